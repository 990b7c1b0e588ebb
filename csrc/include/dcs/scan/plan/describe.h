// A plan in words, as JSON. Host code without CUDA or torch types.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>

#include "dcs/scan/plan/kernels.h"

namespace dcs {

inline const char* name_of(AlignedKernel kernel) {
  switch (kernel) {
    case AlignedKernel::kThreadRows: return "thread_rows";
    case AlignedKernel::kPackedRows: return "packed_rows";
    case AlignedKernel::kWarpRows: return "warp_rows";
    case AlignedKernel::kTileRows: return "tile_rows";
    case AlignedKernel::kFewRows: return "few_rows";
    case AlignedKernel::kResidentRows: return "resident_rows";
    case AlignedKernel::kBulkStream: return "bulk_stream";
    case AlignedKernel::kWarpColumns: return "warp_columns";
    case AlignedKernel::kSplitColumns: return "split_columns";
    case AlignedKernel::kBlockColumns: return "block_columns";
  }
  return "unknown";
}

// An object of numbers, words, truths and other objects. Texts are written as they are: no quotes in them.
class JsonObject {
 public:
  template <typename Value>
  JsonObject& add(const char* key, const Value& value) {
    return raw(key, json(value));
  }
  // Left out where it says nothing.
  template <typename Value>
  JsonObject& add_set(const char* key, Value value) {
    return value ? add(key, value) : *this;
  }
  JsonObject& raw(const char* key, const std::string& value) {
    text_ += (text_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + value;
    return *this;
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  static std::string json(const char* value) { return "\"" + std::string(value) + "\""; }
  static std::string json(bool value) { return value ? "true" : "false"; }
  static std::string json(const JsonObject& value) { return value.text(); }
  template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
  static std::string json(Integer value) {
    return std::to_string(value);
  }

  std::string text_;
};

inline void describe_launch(const DirectWindowPlan&, JsonObject&) {}
inline void describe_launch(const ComposedWindowPlan& plan, JsonObject& launch) { launch.add("rows", plan.rows); }
inline void describe_launch(const AlignedPlan& plan, JsonObject& launch) {
  launch.add("warps", plan.warps).add("tiles", plan.tiles);
  launch.add_set("tile_elements", plan.tile_elements);
  launch.add_set("columns", plan.columns > 1 ? plan.columns : 0).add_set("long_segments", plan.long_segments);
  launch.add_set("cluster", plan.cluster)
      .add_set("row_per_block", plan.row_per_block)
      .add_set("warp_chunks", plan.warp_chunks);
  launch.add_set("in_turn", plan.in_turn)
      .add_set("half_warps", plan.half_warps)
      .add_set("row_clusters", plan.row_clusters);
  launch.add_set("resident_rounds", plan.resident_rounds);
}
inline void describe_launch(const SmallRowsPlan& plan, JsonObject& launch) {
  launch.add("in_float", plan.in_float);
  launch.add("warps", plan.warps).add_set("cluster", plan.cluster > 1 ? plan.cluster : 0);
  launch.add("group_rows", plan.group_rows).add("blocks", plan.blocks);
}
inline void describe_launch(const FlatRowsPlan& plan, JsonObject& launch) {
  launch.add("vectors", plan.vectors).add("warps", plan.warps).add_set("cluster", plan.cluster > 1 ? plan.cluster : 0);
  launch.add("tile", plan.tile).add("tiles", plan.tiles).add("shared_bytes", plan.shared_bytes);
}
inline void describe_launch(const LongRowsPlan& plan, JsonObject& launch) {
  launch.add("vectors", plan.vectors).add("stages", plan.stages).add("tile", plan.tile).add("tiles", plan.tiles);
  launch.add_set("apart", plan.apart).add("blocks", plan.blocks).add("shared_bytes", plan.shared_bytes);
}
inline void describe_launch(const FewStepsPlan& plan, JsonObject& launch) {
  launch.add("unit", plan.unit).add("cells", plan.cells).add("blocks", plan.blocks);
}
inline void describe_launch(const StagedColumnsPlan& plan, JsonObject& launch) {
  launch.add("slabs", plan.slabs).add("steps", plan.steps).add("threads", plan.threads);
  launch.add_set("parts", plan.part_steps ? 1 << (plan.fan_bits + plan.team_bits) : 0)
      .add_set("part_steps", plan.part_steps);
  launch.add("blocks", plan.blocks).add("shared_bytes", plan.shared_bytes);
}
inline void describe_launch(const SerialColumnsPlan& plan, JsonObject& launch) {
  launch.add("pairs", plan.pairs).add("blocks", plan.blocks);
}
inline void describe_launch(const SmallColumnsPlan& plan, JsonObject& launch) {
  launch.add("flat", plan.flat).add("in_float", plan.in_float).add("span", plan.span).add("spans", plan.spans);
  launch.add("steps", plan.steps).add("warps", plan.warps);
  launch.add_set("cluster", plan.cluster > 1 ? plan.cluster : 0);
  launch.add_set("sharers", plan.sharers > 1 ? plan.sharers : 0).add("blocks", plan.blocks);
  launch.add("shared_bytes", plan.shared_bytes);
}
inline void describe_launch(const LookbackColumnsPlan& plan, JsonObject& launch) {
  launch.add_set("apart", plan.apart).add("span", plan.span).add("spans", plan.spans).add("parts", plan.parts);
  launch.add("steps", plan.steps).add("cluster", plan.cluster).add("chunks", plan.chunks).add("group", plan.group);
  launch.add("blocks", plan.blocks);
}
inline void describe_launch(const StreamColumnsPlan& plan, JsonObject& launch) {
  launch.add("parts", plan.parts).add("part_steps", plan.part_steps).add("stages", plan.stages);
  launch.add("tiles", plan.tiles).add("sharers", plan.sharers).add("blocks", plan.blocks);
  launch.add("shared_bytes", plan.shared_bytes);
}
inline void describe_launch(const ResidentColumnsPlan& plan, JsonObject& launch) {
  launch.add("flat", plan.flat).add("span", plan.span).add("spans", plan.spans).add("parts", plan.parts);
  launch.add("part_steps", plan.part_steps).add("early_steps", plan.early_steps).add("tiles", plan.tiles);
  launch.add("groups", plan.groups);
  launch.add("shared_bytes", plan.shared_bytes);
}

// What plan_scan says, and every candidate's answer.
inline std::string describe_plan(const ScanProblem& problem, const DeviceLimits& device) {
  const ScanPlan chosen = plan_scan(problem, device);
  const AlignedPlan* const aligned = std::get_if<AlignedPlan>(&chosen.plan);
  JsonObject launch;
  std::visit([&](const auto& plan) { describe_launch(plan, launch); }, chosen.plan);
  launch.add("workspace_bytes", workspace_bytes(chosen.plan)).add("blocks_run_together", runs_together(chosen.plan));
  std::string candidates;
  for (const Candidate& candidate : kCandidates) {
    JsonObject each;
    each.add("name", candidate.name).add("takes", candidate.takes);
    each.add("can", candidate.plan(problem, device).has_value()).add("chosen", &candidate == chosen.candidate);
    candidates += (candidates.empty() ? "" : ", ") + each.text();
  }
  JsonObject all;
  all.add("outer", problem.outer).add("length", problem.length).add("inner", problem.inner);
  all.add("kernel", chosen.candidate->name);
  if (aligned) all.add("aligned_kernel", name_of(aligned->kernel));
  return all.add("launch", launch).raw("candidates", "[" + candidates + "]").text();
}

}  // namespace dcs

// What the kernel of gradients is called with whose blocks take tiles (tile.cuh).
#pragma once

#include "returns/gradients/params.cuh"
#include "scan/carry/segment_words.cuh"

namespace dcs {

// What a tile publishes for the tiles behind it: its total and the product of its gates.
using GradientWords = SegmentWords<double, true>;

// Whether steps have gates of their own.
inline bool has_step_gates(const ReturnsGradientsProblem& p) { return p.rhos.data || p.has_discount(GammaKind::kStep); }

// A block's shared memory. A word is left out after every 8, for a thread's neighboring slots.
constexpr int padded_slot(int slot) { return slot + slot / kGradientRun; }
constexpr int kGradientTileWarps = kGradientTileThreads / 32;

template <typename T>
struct GradientTileMemory {
  using Acc = typename Types<T>::Acc;
  int entering = 0;  // behind the segments of the warps
  int sources = 0, gates = 0, flags = 0;
  int bytes = 0;

  GradientTileMemory(const ReturnsGradientsProblem& problem, const GradientTilesPlan& plan) {
    const int slots = plan.slots();
    entering = kGradientTileWarps * static_cast<int>(sizeof(Segment<double>));
    sources = entering + kGradientTileWarps * static_cast<int>(sizeof(double));
    gates = sources + rounded(padded_slot(slots) * static_cast<int>(sizeof(Acc)));
    flags = gates +
        rounded(padded_slot(slots) *
            static_cast<int>(has_step_gates(problem)        ? sizeof(Acc)
                    : problem.has_discount(GammaKind::kRow) ? sizeof(Gate<Acc>)
                                                            : 0));
    bytes = flags + (problem.ends.data ? rounded(slots) : 0);
  }

 private:
  static int rounded(int size) { return (size + 15) / 16 * 16; }
};

template <typename T>
struct GradientTileParams {
  GradientsParams<T> call;
  GradientTilesPlan plan;
  GradientTileMemory<T> memory;
  int slots;
  bool has_gates;              // of steps
  uint32_t steps, tile_steps;  // of all, of a tile
  Divisor by_length, by_tile;
  GradientWords* words;
  CallTag tag;

  GradientTileParams(
      const ReturnsGradientsProblem& problem, const GradientTilesPlan& tiles, void* workspace, const CallTag& of_call)
      : call(problem),
        plan(tiles),
        memory(problem, tiles),
        slots(tiles.slots()),
        has_gates(has_step_gates(problem)),
        steps(static_cast<uint32_t>(problem.count())),
        tile_steps(static_cast<uint32_t>(tiles.steps)),
        by_length(static_cast<uint32_t>(problem.length)),
        by_tile(static_cast<uint32_t>(tiles.steps)),
        words(static_cast<GradientWords*>(workspace)),
        tag(of_call) {}
};

}  // namespace dcs

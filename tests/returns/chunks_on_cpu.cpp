// Random problems through the temporal difference scan of any shape (csrc/cuda/returns/chunks) on a CPU, against
// its definition in double: `chunks_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything
// was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/chunks/kernels.cuh"

using namespace dcs;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  using trials::RolloutTrial<T>::RolloutTrial;

  bool run() {
    const ReturnsProblem together = with_rows_together(p);
    plan = plan_returns(together, c.multiprocessors);
    std::vector<Piece<double>> pieces(static_cast<size_t>(plan.workspace_bytes() / kPieceBytes + 1), {NAN, NAN, false});
    const auto params = chunks_params<T>(together, plan, pieces.data());
    const auto launch = [&](auto with_gates) {
      constexpr bool kGates = with_gates.value;
      const int64_t unfinished = plan.whole ? 0 : plan.walks * (plan.chunks - 1), all = plan.walks * plan.chunks;
      const auto run = [&](int64_t blocks, const std::function<void()>& kernel) {
        return blocks == 0 ||
            emulation::launch(blocks, kChunkThreads, sizeof(ReturnsTileMemory<T, kGates>), false, c.seed, kernel);
      };
      return run(unfinished, [&] { returns_pieces_kernel<T, kGates>(params); }) &&
          run(all, [&] { returns_chunks_kernel<T, kGates>(params); });
    };
    const bool ended = has_gates(p) ? launch(std::true_type{}) : launch(std::false_type{});
    return this->is_right(ended) || complain_of_plan();
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;

  bool complain_of_plan() const {
    printf("linear %d, whole %d, %ld walks of %d sequences, %d parts of %d steps, %ld chunks of %ld steps\n",
        plan.linear, plan.whole, plan.walks, plan.sequences, plan.parts, plan.part_steps, plan.chunks,
        plan.chunk_steps);
    return false;
  }

  ReturnsPlan plan{};
};

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial>(count, arguments, trials::draw_rollout); }

// `softmax` and `_softmax_backward` on CUDA: checks, layouts, outputs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/host.h"
#include "dcs/allocate.h"
#include "softmax/launch.h"

namespace dcs {
namespace {

constexpr const char* kSoftmax = "softmax";
constexpr const char* kSoftmaxBackward = "_softmax_backward";

SoftmaxLauncher* launcher(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return launch_softmax_half;
    case ScalarType::BFloat16: return launch_softmax_bfloat16;
    case ScalarType::Double: return launch_softmax_double;
    default: return launch_softmax_float;
  }
}

// The dimensions of more than one element, from the innermost one of memory on.
std::vector<size_t> dimensions(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<size_t> dims;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) dims.push_back(d);
  std::sort(dims.begin(), dims.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  return dims;
}

// Where a tensor's elements fill one range of memory, each once, every dimension lies inside or outside of `dim`:
// (outer, length, inner), contiguous.
std::optional<SoftmaxProblem> dense_problem(const Tensor& tensor, int64_t dim) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;
  for (const size_t d : dimensions(tensor)) {
    if (strides[d] != expected) return std::nullopt;
    expected *= sizes[d];
  }
  SoftmaxProblem problem;
  if (!sizes.empty() && sizes[dim] != 1) {
    problem.length = sizes[dim];
    problem.inner = strides[dim];
  }
  problem.outer = expected / (problem.length * problem.inner);
  return problem;
}

bool same_strides(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes(), of_a = a.strides(), of_b = b.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1 && of_a[d] != of_b[d]) return false;
  return true;
}

// Whether the kernels can read `tensor` beside `output`: at the same offsets, and vectors of 16 bytes begin at the same
// ones.
bool matches(const Tensor& tensor, const Tensor& output) {
  const auto address = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  return same_strides(tensor, output) && (address(tensor) - address(output)) % 16 == 0;
}

// Says in what runs `from` has the elements of `to`, which is dense. False where it lies otherwise: with gaps within
// gaps, or its dimensions in another order.
bool set_runs(const Tensor& from, const Tensor& to, SoftmaxProblem& problem) {
  const auto sizes = from.sizes(), strides = from.strides();
  int64_t elements = 1, expected = 1, run = 0, pitch = 0;  // of `to`; the stride that goes on as it began
  for (const size_t d : dimensions(to)) {
    if (strides[d] != expected) {
      if (run > 0) return false;
      run = elements;
      pitch = expected = strides[d];
    }
    elements *= sizes[d];
    expected *= sizes[d];
  }
  if (run == 0) run = pitch = elements;
  problem.run = run;
  problem.gap = pitch - run;
  return true;
}

class Memory final : public SoftmaxWorkspace {
 public:
  explicit Memory(const Tensor& like) : like_(like) {}
  void* allocate(int64_t bytes) override {
    memory_ = Workspace(like_, bytes);
    return memory_.data();
  }

 private:
  const Tensor& like_;
  Workspace memory_;
};

// The input is a view where it does not match the output: it has holes, is expanded or begins inside a vector. One
// whose elements do not lie in runs is copied into the output, and the kernel runs in place.
void run(const char* op, SoftmaxProblem problem, const Tensor& input, const Tensor* saved, Tensor& output) {
  problem.input = input.const_data_ptr();
  if (!matches(input, output) && !set_runs(input, output, problem)) {
    torch::stable::copy_(output, input);
    problem.input = output.const_data_ptr();
  }
  problem.saved = saved ? saved->const_data_ptr() : nullptr;
  problem.output = output.mutable_data_ptr();
  problem.backward = saved != nullptr;
  const int32_t device = output.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Memory workspace(output);
  check_cuda(launcher(output.scalar_type())(problem, device_of(device, op), workspace, current_stream(device)), op,
      "launching the kernel");
}

Tensor softmax(Tensor input, int64_t dim) {
  check_real_floating(kSoftmax, "input", input);
  dim = check_dim(kSoftmax, dim, input.dim());
  if (input.numel() == 0) return torch::stable::empty_like(input);
  std::optional<SoftmaxProblem> problem = dense_problem(input, dim);
  Tensor output = problem ? new_dense(input) : new_like(input);
  if (!problem) problem = dense_problem(output, dim);
  run(kSoftmax, *problem, input, nullptr, output);
  return output;
}

Tensor softmax_backward(Tensor grad, Tensor output, int64_t dim) {
  check_real_floating(kSoftmaxBackward, "grad", grad);
  dim = check_dim(kSoftmaxBackward, dim, grad.dim());
  if (output.scalar_type() != grad.scalar_type() || !same_sizes(output, grad))
    fail(kSoftmaxBackward, ": output must have grad's dtype and shape ", dtype_name(grad.scalar_type()), " ",
        shape_text(sizes_of(grad)), ", got ", dtype_name(output.scalar_type()), " ", shape_text(sizes_of(output)));
  if (!same_device(output, grad))
    fail(kSoftmaxBackward, ": output must be on grad's device ", device_text(grad), ", got ", device_text(output));
  if (output.numel() == 0) return torch::stable::empty_like(output);
  std::optional<SoftmaxProblem> problem = dense_problem(output, dim);
  Tensor grad_input = problem ? new_dense(output) : new_like(output);
  // What does not match is copied; the gradient, expanded behind a sum, into the result.
  if (!problem || !matches(output, grad_input)) {
    Tensor dense = torch::stable::empty_like(grad_input);
    torch::stable::copy_(dense, output);
    output = dense;
    problem = dense_problem(output, dim);
  }
  run(kSoftmaxBackward, *problem, grad, &output, grad_input);
  return grad_input;
}

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) {
  m.impl(dcs::kSoftmax, TORCH_BOX(&dcs::softmax));
  m.impl(dcs::kSoftmaxBackward, TORCH_BOX(&dcs::softmax_backward));
}

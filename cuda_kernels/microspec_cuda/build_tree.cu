#include "build_tree.cuh"

#include "../common/ops.h"
#include "launch.h"

namespace microspec {

namespace {

constexpr int MAX_CANDIDATES = 4096;

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> build_tree(const Tensor& scores, const Tensor& tokens,
                                                      const Tensor& parents, const Tensor& root,
                                                      int64_t num_nodes) {
  const int num_candidates = static_cast<int>(check_tree(scores, tokens, parents, root, num_nodes));
  check_cuda({"build_tree", "scores", scores});
  check_at_most("build_tree", "candidates", num_candidates, MAX_CANDIDATES);
  const auto new_nodes = [&] { return new_tensor(scores, {num_nodes}, ScalarType::Long); };
  Tensor node_tokens = new_nodes(), node_parents = new_nodes(), depths = new_nodes(), ancestors = new_nodes();

  const Launch launch(scores);
  const auto run = [&](auto kernel, int threads) {
    launch.start(kernel, dim3(1), dim3(threads), 0, 1, data<const float>(scores), data<const int64_t>(tokens),
                 data<const int64_t>(parents), data<const int64_t>(root), num_candidates, num_nodes,
                 data<int64_t>(node_tokens), data<int64_t>(node_parents), data<int64_t>(depths),
                 data<int64_t>(ancestors));
  };
  if (num_candidates <= 512) {
    run(device::build_tree::kernel<512, 1>, 512);
  } else if (num_candidates <= 1024) {
    run(device::build_tree::kernel<1024, 1>, 1024);
  } else {
    run(device::build_tree::kernel<1024, 4>, 1024);
  }
  return {node_tokens, node_parents, depths, ancestors};
}

}  // namespace microspec

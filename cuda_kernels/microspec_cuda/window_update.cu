#include "window_update.cuh"

#include "../common/ops.h"
#include "launch.h"

namespace microspec {

std::tuple<Tensor, Tensor, Tensor> window_update(Tensor slot_of, Tensor token_of, Tensor usage, Tensor ring,
                                                 Tensor clock, const Tensor& candidates, const Tensor& pinned,
                                                 bool stream) {
  check_window(slot_of, token_of, usage, ring, clock, candidates, pinned);
  check_cuda({"window_update", "slot_of", slot_of});
  check_at_most("window_update", "candidates", candidates.size(0), device::window_update::MAX_CANDIDATES);
  check_at_most("window_update", "slots", token_of.size(0), device::window_update::MAX_SLOTS);
  check_at_most("window_update", "vocabulary size", slot_of.size(0), 0x7fffffff);
  check_at_most("window_update", "ring length", ring.size(0), 0x7fffffff);
  const int64_t num_candidates = candidates.size(0);
  Tensor rows = new_tensor(candidates, {num_candidates}, ScalarType::Long);
  Tensor slots = new_tensor(candidates, {num_candidates}, ScalarType::Long);
  Tensor counts = new_tensor(candidates, {2}, ScalarType::Int);

  const Launch launch(slot_of);
  const device::window_update::Window window = {
      data<int>(slot_of), data<int>(token_of), data<int>(usage), data<int>(ring), data<int64_t>(clock),
      data<const bool>(pinned), static_cast<int>(slot_of.size(0)), static_cast<int>(token_of.size(0)),
      static_cast<unsigned>(ring.size(0))};
  const device::window_update::Changes changes = {data<int64_t>(rows), data<int64_t>(slots), data<int>(counts)};
  using namespace device::window_update;
  const bool is_vectorised = window.num_slots % 16 == 0 && is_aligned(token_of, 16) && is_aligned(usage, 16) &&
                             is_aligned(pinned, 16);
  const auto chosen = stream ? (is_vectorised ? kernel<true, true> : kernel<true, false>)
                             : (is_vectorised ? kernel<false, true> : kernel<false, false>);
  launch.start(chosen, dim3(1), dim3(THREADS), shared_bytes(window.num_slots), 1, window,
               data<const int64_t>(candidates), num_candidates, table_size(num_candidates), changes);
  return {rows, slots, counts};
}

}  // namespace microspec

// What every launcher needs: the current stream of a tensor's device, and a check of the launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include "../common/checks.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace microspec {

class Launch {
 public:
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  void check() const { STD_CUDA_KERNEL_LAUNCH_CHECK(); }

  // Compute capability of the device, as 90 for 9.0.
  static int architecture(const Tensor& tensor) {
    int major = 0, minor = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, tensor.get_device_index()));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, tensor.get_device_index()));
    return 10 * major + minor;
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

inline void check_cuda(const Argument& argument) {
  STD_TORCH_CHECK(argument.tensor.is_cuda(), argument.op, ": ", argument.name, " must be on a CUDA device, got ",
                  Argument::device_of(argument.tensor), ".");
}

inline bool is_aligned(const Tensor& tensor, size_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes == 0;
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Calls `body(T{})` with the element type of half, bfloat16 or float logits.
template <typename Body>
void for_logits_type(const char* op, const Tensor& logits, Body&& body) {
  switch (logits.scalar_type()) {
    case ScalarType::Half: return body(__half{});
    case ScalarType::BFloat16: return body(__nv_bfloat16{});
    case ScalarType::Float: return body(float{});
    default:
      STD_TORCH_CHECK(false, op, ": logits must be Half, BFloat16 or Float for this kernel, got ",
                      torch::headeronly::toString(logits.scalar_type()), ".");
  }
}

}  // namespace microspec

// What every launcher needs: a launch on the current stream of a tensor's device, checked.
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
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()), architecture_(architecture_of(tensor)) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  // Compute capability of the device, as 90 for 9.0.
  int architecture() const { return architecture_; }

  // Starts a kernel that calls wait_for_earlier(), as early as the device can. `cluster` blocks along x share their
  // memory; `shared_bytes` is dynamic shared memory.
  template <typename... Parameters, typename... Arguments>
  void start(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster,
             const Arguments&... arguments) const {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    config.attrs = attributes;
    const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = id;
      return attribute.val;
    };
    if (architecture_ >= 90) {
      add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) add(cudaLaunchAttributeClusterDimension).clusterDim = {cluster, 1, 1};
    // More than 48 KB of shared memory must be asked for.
    if (shared_bytes > 48 * 1024) {
      STD_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_bytes)));
    }
    STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  }

 private:
  static int architecture_of(const Tensor& tensor) {
    int major = 0, minor = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, tensor.get_device_index()));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, tensor.get_device_index()));
    return 10 * major + minor;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  int architecture_;
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

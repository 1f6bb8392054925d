#include <algorithm>

#include "../common/ops.h"
#include "compact_kv.cuh"
#include "gather_rows.cuh"
#include "launch.h"

namespace microspec {

namespace {

// Calls `body(Unit{})` with the widest unit that divides all rows and that the pointers are aligned to.
template <typename Body>
void for_unit(int64_t row_bytes, uintptr_t pointers, Body&& body) {
  const uintptr_t all = pointers | static_cast<uintptr_t>(row_bytes);
  if (all % 16 == 0) return body(uint4{});
  if (all % 8 == 0) return body(uint2{});
  if (all % 4 == 0) return body(uint32_t{});
  if (all % 2 == 0) return body(uint16_t{});
  return body(uint8_t{});
}

uintptr_t address(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()); }

unsigned power_of_two_at_least(int64_t value, unsigned limit) {
  unsigned power = 1;
  while (power < limit && power < value) power *= 2;
  return power;
}

}  // namespace

void gather_rows(Tensor out, const Tensor& weight, const Tensor& rows, const Tensor& slots, const Tensor& count) {
  check_gather(out, weight, rows, slots, count);
  check_cuda({"gather_rows", "out", out});
  const int64_t num_entries = rows.size(0), num_rows = weight.size(0), num_slots = out.size(0);
  if (num_entries == 0 || num_rows == 0 || num_slots == 0 || weight.numel() == 0) return;
  check_at_most("gather_rows", "entries", num_entries, int64_t{1} << 30);
  const int64_t row_bytes = weight.numel() / num_rows * static_cast<int64_t>(weight.element_size());

  const Launch launch(out);
  for_unit(row_bytes, address(out) | address(weight), [&](auto unit) {
    using Unit = decltype(unit);
    using namespace device::gather_rows;
    const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
    check_at_most("gather_rows", "elements of a row", units, int64_t{1} << 30);
    const unsigned width = power_of_two_at_least((units + IN_FLIGHT - 1) / IN_FLIGHT, THREADS);
    const unsigned height = THREADS / width;
    const dim3 grid(static_cast<unsigned>((num_entries + height - 1) / height),
                    static_cast<unsigned>(std::min<int64_t>(
                        65535, (units + width * IN_FLIGHT - 1) / (width * IN_FLIGHT))));
    const auto run = [&](auto index) {
      using Index = decltype(index);
      launch.start(kernel<Unit, Index>, grid, dim3(width, height), 0, 1, data<Unit>(out), data<const Unit>(weight),
                   data<const Index>(rows), data<const Index>(slots), data<const int>(count), num_entries, units,
                   num_rows, num_slots);
    };
    if (rows.scalar_type() == ScalarType::Int) {
      run(int32_t{});
    } else {
      run(int64_t{});
    }
  });
}

void compact_kv(std::vector<Tensor> buffers, const Tensor& path, const Tensor& start) {
  check_compact(buffers, path, start);
  check_cuda({"compact_kv", "path", path});
  check_at_most("compact_kv", "length of the path", path.size(0), device::compact_kv::MAX_PATH);
  if (buffers.empty() || path.size(0) == 0) return;

  const Launch launch(path);
  const auto bytes_of_row = [](const Tensor& buffer) {
    return buffer.size(3) * static_cast<int64_t>(buffer.element_size());
  };
  // One launch for each run of buffers of one shape: one in all for a model with equal layers.
  for (size_t first = 0; first < buffers.size();) {
    const Tensor& shape = buffers[first];
    device::compact_kv::Buffers pointers;
    uintptr_t addresses = 0;
    size_t size = 0;
    for (; first + size < buffers.size() && size < device::compact_kv::MAX_BUFFERS; ++size) {
      const Tensor& buffer = buffers[first + size];
      if (buffer.size(1) != shape.size(1) || buffer.size(2) != shape.size(2) ||
          bytes_of_row(buffer) != bytes_of_row(shape)) {
        break;
      }
      pointers.data[size] = buffer.data_ptr();
      addresses |= address(buffer);
    }
    first += size;
    if (shape.numel() == 0) continue;
    for_unit(bytes_of_row(shape), addresses, [&](auto unit) {
      using Unit = decltype(unit);
      const int64_t units = bytes_of_row(shape) / static_cast<int64_t>(sizeof(Unit));
      const int64_t columns = shape.size(1) * units;
      check_at_most("compact_kv", "columns of a position", columns, 1 << 30);
      const dim3 grid(static_cast<unsigned>((columns + device::compact_kv::THREADS - 1) / device::compact_kv::THREADS),
                      static_cast<unsigned>(size));
      launch.start(device::compact_kv::kernel<Unit>, grid, dim3(device::compact_kv::THREADS), 0, 1, pointers,
                   data<const int64_t>(path), data<const int64_t>(start), path.size(0), shape.size(1), shape.size(2),
                   units);
    });
  }
}

}  // namespace microspec

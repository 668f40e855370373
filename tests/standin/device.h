// The parts of the stand-in that its kernels need of its runtime.
#pragma once

#include "tracker.h"

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace standin {

constexpr int COUNT = 4;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

Tracker& tracker();
int current_device();
int64_t current_stream(int device);

// Device memory: host memory, and what the tracker knows of it.
struct Memory {
  c10::Storage host;
  Use use;

  explicit Memory(c10::Storage storage) : host(std::move(storage)) {}
  ~Memory();
};

using Shared = std::shared_ptr<Memory>;

// The storage of a device over host memory, allocated now on the device's current stream.
c10::Storage adopt(c10::Storage host, int device);
Shared memory_of(const c10::Storage& storage);
// After a kernel has given the host memory another size.
void refresh(const c10::Storage& storage);

at::Generator& default_generator(int device);
// The CPU generator inside a generator of a device.
at::Generator inner(const at::Generator& generator);

}  // namespace standin

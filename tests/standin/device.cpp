// A device type of its own for PyTorch: devices, streams, events, memory and generators that exist in name only.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>

namespace standin {

Tracker& tracker() {
  static Tracker* made = new Tracker;  // never destroyed: tensors may outlive everything
  return *made;
}

namespace {

thread_local int device_now = 0;
thread_local std::array<int64_t, COUNT> stream_now{};
std::atomic<int64_t> next_stream{1};

int checked(int device) {
  TORCH_CHECK(0 <= device && device < COUNT, "there are devices 0 to ", COUNT - 1, ", not ", device);
  return device;
}

double now() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override { return c10::Device(TYPE, device_now); }
  void setDevice(c10::Device device) const override { device_now = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < COUNT) device_now = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    int index = device.has_index() ? checked(device.index()) : device_now;
    return stream(index, stream_now[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device.has_index() ? checked(device.index()) : device_now, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device.has_index() ? checked(device.index()) : device_now, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream given) const override {
    int index = checked(given.device_index());
    c10::Stream before = stream(index, stream_now[index]);
    stream_now[index] = given.id();
    return before;
  }

  void record(void** event, const c10::Stream& given, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    tracker().record(*static_cast<Event*>(*event), given.device_index(), given.id(), now());
  }
  void block(void* event, const c10::Stream& given) const override {
    if (event) tracker().wait(*static_cast<Event*>(event), given.device_index(), given.id());
  }
  bool queryEvent(void* event) const override { return !event || tracker().seen(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) tracker().host_waits(*static_cast<Event*>(event));
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded");
    return static_cast<Event*>(second)->milliseconds - static_cast<Event*>(first)->milliseconds;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  bool queryStream(const c10::Stream& given) const override { return tracker().idle(given.device_index(), given.id()); }
  void synchronizeStream(const c10::Stream& given) const override {
    tracker().host_waits(given.device_index(), given.id());
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { tracker().host_waits(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const override;

 private:
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void release(void* handle) { delete static_cast<Shared*>(handle); }

c10::DataPtr pointer(const Shared& memory, int device) {
  void* data = const_cast<void*>(memory->host.data());
  return c10::DataPtr(data, new Shared(memory), &release, c10::Device(TYPE, device));
}

Shared* handle_of(const c10::DataPtr& data) { return data.cast_context<Shared>(&release); }

c10::Storage host_storage(size_t bytes) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, true);
}

Shared made(c10::Storage host, int device) {
  auto memory = std::make_shared<Memory>(std::move(host));
  char* data = static_cast<char*>(const_cast<void*>(memory->host.data()));
  tracker().allocated(memory->use, device, current_stream(device), data, memory->host.nbytes());
  return memory;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return pointer(made(host_storage(bytes), device_now), device_now); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (Shared* handle = handle_of(data)) tracker().keep_for((*handle)->use, stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

Allocator& allocator() {
  static Allocator* one = new Allocator;
  return *one;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator());

struct Pinned {
  c10::DataPtr data;
  Use use;
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* own = new Pinned{c10::GetCPUAllocator()->allocate(bytes), {}};
    char* data = static_cast<char*>(own->data.get());
    if (data) tracker().add_pinned(own->use, data, bytes);
    return c10::DataPtr(data, own, &drop, c10::Device(c10::DeviceType::CPU));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  static void drop(void* context) {
    auto* own = static_cast<Pinned*>(context);
    if (own->use.data) tracker().drop_pinned(own->use);
    delete own;
  }
};

// Numbers as the CPU draws them, from a state per device.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;

  explicit Generator(int device, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator(seed)) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return at::Generator(cpu).seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->cpu = cpu.clone();
    return made;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex before = device_now;
    device_now = checked(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? device_now : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return tracker().pinned_at(data) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* one = new PinnedAllocator;
    return one;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? device_now : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? device_now : checked(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    Shared memory = memory_of(storage);
    c10::Storage larger = host_storage(bytes);
    size_t common = std::min(bytes, memory->host.nbytes());
    if (common) std::memcpy(larger.mutable_data(), memory->host.data(), common);
    int device = storage.device().index();
    storage.set_data_ptr_noswap(pointer(made(std::move(larger), device), device));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const {
  allocator().recordStream(data, given);
}

}  // namespace

int current_device() { return device_now; }
int64_t current_stream(int device) { return stream_now[device]; }

Memory::~Memory() { tracker().freed(use); }

c10::Storage adopt(c10::Storage host, int device) {
  size_t bytes = host.nbytes();
  return c10::Storage(
      c10::Storage::use_byte_size_t(), bytes, pointer(made(std::move(host), device), device), &allocator(), true);
}

Shared memory_of(const c10::Storage& storage) {
  Shared* handle = handle_of(storage.data_ptr());
  TORCH_CHECK(handle, "this storage is not the stand-in's own");
  return *handle;
}

void refresh(const c10::Storage& storage) {
  Shared memory = memory_of(storage);
  if (memory->host.data() == storage.data() && memory->host.nbytes() == storage.nbytes()) return;
  int device = storage.device().index();
  storage.set_nbytes(memory->host.nbytes());
  storage.set_data_ptr_noswap(pointer(made(memory->host, device), device));
}

at::Generator& default_generator(int device) {
  static std::vector<at::Generator>* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < COUNT; ++index) made->push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return (*all)[checked(device)];
}

at::Generator inner(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace standin

// Kernels: the CPU's own through call.h, and by hand what has to do with memory, with the host, or with random numbers.
#include "call.h"

namespace standin {
namespace {

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(op); }

const c10::OperatorHandle& handle(const char* name) {
  static std::map<std::string, c10::OperatorHandle> known;
  static std::mutex lock;
  std::lock_guard<std::mutex> guard(lock);
  return known.try_emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first->second;
}

// What PyTorch leaves to other backends, by what the CPU does for itself.
void convolution(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(handle("aten::convolution")); }

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  int64_t channels = grad.size(1);
  Stack stack;
  torch::jit::push(
      stack, grad, input, weight, std::vector<int64_t>{channels}, stride.vec(), padding.vec(), dilation.vec(),
      transposed, output_padding.vec(), groups, std::vector<bool>(mask.begin(), mask.end()));
  const auto& op = handle("aten::convolution_backward");
  Call(op, &stack).run(op);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "the stand-in has strided tensors only");
  c10::Device where = device.value_or(c10::Device(TYPE));
  c10::DeviceGuard guard(c10::Device(TYPE, where.has_index() ? where.index() : current_device()));
  return at::detail::empty_generic(size, c10::GetAllocator(TYPE), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::Device where = device.value_or(c10::Device(TYPE));
  c10::DeviceGuard guard(c10::Device(TYPE, where.has_index() ? where.index() : current_device()));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(TYPE),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

void copy_bytes(const Tensor& to, const Tensor& from) {
  Bare bare;
  to.copy_(from);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  auto [from_low, from_high] = bytes_of(self);
  auto [to_low, to_high] = bytes_of(to);
  if (ours(self) && ours(to)) {
    int source = self.device().index(), target = to.device().index();
    int64_t stream = current_stream(source), other = current_stream(target);
    if (source != target) tracker().wait(source, stream, target, other);
    copy_bytes(on_host(to), on_host(self));
    auto work = tracker().start(source, stream, "copy " + shape_of(self));
    tracker().use(memory_of(self.storage())->use, work, from_low, from_high, false);
    tracker().use(memory_of(to.storage())->use, work, to_low, to_high, true);
    if (source != target) tracker().wait(target, other, source, stream);
    return to;
  }
  bool back = ours(self);
  const Tensor& host = back ? to : self;
  int device = (back ? self : to).device().index();
  int64_t stream = current_stream(device);
  auto work = tracker().start(device, stream, (back ? "copy to the host " : "copy from the host ") + shape_of(self));
  if (back) tracker().use(memory_of(self.storage())->use, work, from_low, from_high, false);
  Use* pinned = tracker().pinned_at(host.storage().data());
  size_t shift = pinned ? static_cast<const char*>(host.storage().data()) - pinned->data : 0;
  auto [low, high] = bytes_of(host);
  if (pinned) tracker().use(*pinned, work, shift + low, shift + high, back);
  if (back) copy_bytes(to, on_host(self));
  else {
    copy_bytes(on_host(to), self);
    tracker().use(memory_of(to.storage())->use, work, to_low, to_high, true);
  }
  bool beside = non_blocking && pinned && host.is_non_overlapping_and_dense();
  if (beside && back) tracker().arrives_late(*pinned, work, shift + low, shift + high);
  else if (beside) tracker().is_read(*pinned, work, shift + low, shift + high);
  else if (!non_blocking || back) tracker().host_waits(device, stream);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  int device = self.device().index();
  auto work = tracker().start(device, current_stream(device), "item");
  auto [low, high] = bytes_of(self);
  tracker().use(memory_of(self.storage())->use, work, low, high, false);
  tracker().host_waits(device, current_stream(device));
  Bare bare;
  return at::_local_scalar_dense(on_host(self));
}

Tensor& set_storage_at(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    std::vector<int64_t> dense(size.size());
    int64_t step = 1;
    for (size_t dim = size.size(); dim-- > 0; step *= std::max<int64_t>(size[dim], 1)) dense[dim] = step;
    impl->set_sizes_and_strides(size, dense, offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return set_storage_at(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

bool compatible(const Tensor&, const Tensor&) { return true; }

void record_stream(Tensor& self, c10::Stream stream) {
  tracker().keep_for(memory_of(self.storage())->use, stream.id());
}

// As on GPUs this kernel draws from the device's own generator and takes no other.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  Tensor mask = noise.ne(0);
  return {input.mul(noise.div_(1 - p)), mask};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  return grad.mul(mask.to(grad.scalar_type()).div_(1 / scale));  // divided, as the CPU's dropout does
}

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // plain mathematics
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_at);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &compatible);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("native_dropout", &native_dropout);
  library.impl("native_dropout_backward", &native_dropout_backward);
  library.impl("_fused_sdp_choice", &attention_choice);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// What the CPU's autocast does with the same operations, as far as the tests use them.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

TORCH_LIBRARY(standin, library) {
  library.def("problems() -> str[]", [] { return tracker().problems(); });
  library.def("reset() -> ()", [] { tracker().reset(); });
  library.def("slow(bool on) -> ()", [](bool on) { tracker().slow(on); });
  library.def("works() -> int", [] { return tracker().works(); });
  library.def("live(int device) -> int", [](int64_t device) { return tracker().live(device); });
  library.def("name_stream(int device, int stream, str name) -> ()",
              [](int64_t device, int64_t stream, std::string name) { tracker().rename(device, stream, std::move(name)); });
  library.def("generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
}

namespace {

// The functional and in-place forms too, where the CPU has them: left to themselves they would come here as out= forms,
// which is another way of calling and warns about sizes.
void register_others() {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    library->impl(full_name(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

const bool remembered = [] {
  remember_draws();
  register_others();
  return true;
}();

}  // namespace

}  // namespace standin

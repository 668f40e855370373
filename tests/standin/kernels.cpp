// Kernels: each runs the CPU's own on the same memory, at once, and tells the tracker what it reads and writes.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_map>

namespace standin {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

bool ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The same bytes as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(memory_of(tensor.storage())->host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return Tensor(std::move(impl));
}

Tensor on_device(const Tensor& host, c10::Storage storage) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return Tensor(std::move(impl));
}

std::pair<size_t, size_t> bytes_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  size_t first = tensor.storage_offset() * tensor.itemsize();
  return {first, first + (last + 1) * tensor.itemsize()};
}

std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t size : tensor.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// No autograd and no autocast around the CPU's kernels: both have been here before.
struct Bare {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// CPU kernels of operations that draw, as they were when this was loaded: others may stand in front of them later.
std::unordered_map<std::string, c10::SafeKernelFunction>& draws() {
  static auto* all = new std::unordered_map<std::string, c10::SafeKernelFunction>;
  return *all;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void remember_draws() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    for (const auto& argument : op->schema().arguments())
      if (argument.name() == "generator") {
        draws().emplace(full_name(name), op->getComputedKernelForDispatchKey(c10::DispatchKey::CPU));
        break;
      }
  }
}

// Operations that write what their schema does not say, by the argument's place.
const std::map<std::string, std::vector<size_t>> SILENT = {{"aten::native_batch_norm", {3, 4}}};
// Operations whose results' size the host must know, and so waits for.
const std::set<std::string> SYNCHRONOUS = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                           "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount"};
bool takes_host_tensors(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
         name.rfind("aten::_unsafe_index", 0) == 0 || name.rfind("aten::_foreach", 0) == 0 ||
         name.rfind("aten::_fused_", 0) == 0;
}

struct Given {  // a tensor argument
  Tensor tensor, host;
  bool write;
};

// One call of an operation on the CPU's kernels.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : schema_(op.schema()), stack_(stack) {}

  void run(const c10::OperatorHandle& target) {
    const std::string& name = schema_.name();
    size_t count = schema_.arguments().size(), base = stack_->size() - count;
    auto silent = SILENT.find(name);
    for (size_t place = 0; place < count; ++place) {
      const auto* alias = schema_.arguments()[place].alias_info();
      bool write = alias && alias->isWrite();
      if (silent != SILENT.end() && std::count(silent->second.begin(), silent->second.end(), place)) write = true;
      replace((*stack_)[base + place], write);
    }
    find_device(name);
    c10::DeviceGuard guard(c10::Device(TYPE, device_));
    auto drawing = draws().find(full_name(schema_.operator_name()));
    if (drawing != draws().end()) give_generator(base, count);
    {
      Bare bare;
      if (drawing != draws().end())
        drawing->second.callBoxed(target, c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
      else
        target.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    size_t results = schema_.returns().size(), from = stack_->size() - results;
    bool view = false;
    for (const auto& one : schema_.returns()) view |= one.alias_info() && !one.alias_info()->isWrite();
    std::string text = name.substr(name.find("::") + 2);
    for (const Given& one : given_)
      if (ours(one.tensor)) {
        text += " " + shape_of(one.tensor);
        break;
      }
    Tracker::Work work{};
    if (!view) {
      work = tracker().start(device_, current_stream(device_), text);
      for (const Given& one : given_) note(one, work);
    }
    for (const Given& one : given_)
      if (one.write && ours(one.tensor)) follow(one);
    bool waits = SYNCHRONOUS.count(name) > 0;
    for (size_t place = 0; place < results; ++place) {
      IValue& value = (*stack_)[from + place];
      const auto& type = schema_.returns()[place].type();
      waits |= !view && type->kind() != c10::TypeKind::TensorType && type->kind() != c10::TypeKind::ListType;
      give_back(value, work);
    }
    if (waits) tracker().host_waits(device_, current_stream(device_));
  }

 private:
  Tensor taken(const Tensor& tensor, bool write) {
    if (!ours(tensor)) {
      if (tensor.defined()) given_.push_back({tensor, tensor, write});
      return tensor;
    }
    Tensor host = on_host(tensor);
    given_.push_back({tensor, host, write});
    return host;
  }

  void replace(IValue& value, bool write) {
    if (value.isTensor()) {
      value = taken(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorVector()) list.push_back(taken(one, write));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& one : value.toOptionalTensorVector())
        list.push_back(one.has_value() ? std::optional<Tensor>(taken(*one, write)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      asked_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
      value = c10::Device(c10::DeviceType::CPU);
    }
  }

  void find_device(const std::string& name) {
    for (const Given& one : given_) {
      if (!ours(one.tensor)) continue;
      int index = one.tensor.device().index();
      TORCH_CHECK(device_ < 0 || device_ == index, name, ": Expected all tensors to be on the same device, but found at "
                  "least two devices, standin:", device_, " and standin:", index, "!");
      device_ = index;
    }
    if (device_ < 0) device_ = asked_ < 0 ? current_device() : asked_;
    for (const Given& one : given_)
      TORCH_CHECK(ours(one.tensor) || one.tensor.dim() == 0 || takes_host_tensors(name), name, ": Expected all tensors "
                  "to be on the same device, but found at least two devices, standin:", device_, " and cpu!");
  }

  void give_generator(size_t base, size_t count) {
    for (size_t place = 0; place < count; ++place) {
      if (schema_.arguments()[place].name() != "generator") continue;
      IValue& value = (*stack_)[base + place];
      at::Generator own = value.isNone() ? default_generator(device_) : value.toGenerator();
      TORCH_CHECK(own.device().type() == TYPE, "Expected a 'standin' device type for generator but found '",
                  own.device().type(), "'");
      value = inner(own);
    }
  }

  void note(const Given& one, const Tracker::Work& work) {
    if (!ours(one.tensor)) return;
    auto [low, high] = bytes_of(one.tensor);
    tracker().use(memory_of(one.tensor.storage())->use, work, low, high, one.write);
  }

  // A kernel may have given an output another size.
  void follow(const Given& one) {
    refresh(one.tensor.storage());
    if (!one.tensor.sizes().equals(one.host.sizes()) || !one.tensor.strides().equals(one.host.strides()) ||
        one.tensor.storage_offset() != one.host.storage_offset())
      one.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
          one.host.sizes(), one.host.strides(), one.host.storage_offset());
  }

  void give_back(IValue& value, const Tracker::Work& work) {
    if (value.isTensor()) {
      value = given_back(value.toTensor(), work);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorVector()) list.push_back(given_back(one, work));
      value = list;
    }
  }

  Tensor given_back(const Tensor& made, const Tracker::Work& work) {
    if (!made.defined() || ours(made)) return made;
    for (const Given& one : given_)
      if (made.is_same(one.host)) return one.tensor;
    for (const Given& one : given_)
      if (ours(one.tensor) && made.has_storage() &&
          made.storage().unsafeGetStorageImpl() == one.host.storage().unsafeGetStorageImpl())
        return on_device(made, one.tensor.storage());
    auto [found, fresh] = fresh_.try_emplace(made.storage().unsafeGetStorageImpl());
    if (fresh) found->second = adopt(made.storage(), device_);
    Tensor result = on_device(made, found->second);
    if (work.what) note({result, made, true}, work);
    return result;
  }

  const c10::FunctionSchema& schema_;
  Stack* stack_;
  std::vector<Given> given_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> fresh_;
  int device_ = -1, asked_ = -1;
};

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

// One call of an operation: the CPU's own kernel on the same memory, at once, and what the tracker is told of it.
#pragma once

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
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

}  // namespace
}  // namespace standin

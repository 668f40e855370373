// What happened before what, on streams that exist in name only.
//
// Every kernel of the stand-in runs at once on the host, but it counts as work of a stream. A stream has a clock for
// every stream: how far that one is known to have come before its own next work. Recording an event copies the clocks,
// waiting for it joins them, and so does whatever makes the host wait. Two uses of the same bytes, one of them a write,
// on streams whose clocks do not order them are a race, however the numbers came out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace standin {

class Clock {
 public:
  uint64_t at(size_t slot) const { return slot < times_.size() ? times_[slot] : 0; }

  void set(size_t slot, uint64_t time) {
    if (slot >= times_.size()) times_.resize(slot + 1, 0);
    times_[slot] = time;
  }

  void join(const Clock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size(), 0);
    for (size_t slot = 0; slot < other.times_.size(); ++slot) times_[slot] = std::max(times_[slot], other.times_[slot]);
  }

  void clear() { times_.clear(); }

 private:
  std::vector<uint64_t> times_;
};

using Text = std::shared_ptr<const std::string>;

struct Moment {  // a point of a stream's own time
  size_t slot = 0;
  uint64_t time = 0;

  bool before(const Clock& clock, size_t own) const { return slot == own || time <= clock.at(slot); }
};

struct Access {
  Moment when;
  size_t low, high;  // bytes
  bool write;
  Text what;

  bool covers(size_t from, size_t to) const { return low <= from && to <= high; }
  bool meets(size_t from, size_t to) const { return low < to && from < high; }
};

struct Stream {
  int device;
  int64_t id;
  size_t slot;
  std::string name;
  uint64_t time = 0;
  Clock known;
  struct Freed {
    std::string what;
    std::vector<Access> uses;
  };
  std::vector<Freed> freed;  // since the last allocation
};

struct Use {  // memory as the tracker sees it: on a device, or pinned on the host
  int device = -1;
  int64_t stream = 0;  // whose pool it belongs to
  uint64_t epoch = 0;
  size_t bytes = 0;
  char* data = nullptr;
  std::vector<Access> accesses;
  std::set<int64_t> kept_for;  // streams of record_stream: the pool waits for them
};

struct Event {
  uint64_t epoch = 0;
  bool recorded = false;
  Moment when;
  Clock known;
  double milliseconds = 0;
  int asked = 0;  // how often the host has looked
};

class Tracker {
 public:
  struct Work {  // one kernel or copy
    size_t slot;
    Moment when;
    Clock known;
    Text what;
  };

  Work start(int device, int64_t stream, std::string what) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    Stream& own = of(device, stream);
    own.known.join(host_);
    own.known.set(own.slot, ++own.time);
    ++works_;
    return Work{own.slot, {own.slot, own.time}, own.known,
                std::make_shared<const std::string>(what + " on " + own.name)};
  }

  void use(Use& memory, const Work& work, size_t low, size_t high, bool write) {
    if (low >= high) return;
    std::lock_guard<std::recursive_mutex> guard(lock_);
    renew(memory);
    for (const Access& other : memory.accesses) {
      if (!other.meets(low, high) || !(write || other.write) || other.when.before(work.known, work.slot)) continue;
      problem(std::string("race: ") + *work.what + (write ? " writes" : " reads") + " what " + *other.what +
              (other.write ? " has written" : " still reads") + ", and does not wait for it");
    }
    auto& all = memory.accesses;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& old) {
      bool older = old.when.before(work.known, work.slot);
      return older && low <= old.low && old.high <= high && (write || (!old.write && old.when.slot == work.slot));
    }), all.end());
    all.push_back({work.when, low, high, write, work.what});
    if (memory.device < 0) settle_written(memory, low, high, write);
  }

  // Memory counts as written by the stream that asked for it: what the stream did before may have used it.
  void allocated(Use& memory, int device, int64_t stream, char* data, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    Stream& own = of(device, stream);
    own.known.join(host_);
    for (const Stream::Freed& old : own.freed)
      for (const Access& access : old.uses)
        if (!access.when.before(own.known, own.slot))
          problem("early free: " + own.name + " takes " + old.what + " again, which " + *access.what +
                  (access.write ? " has written" : " still reads"));
    own.freed.clear();
    own.known.set(own.slot, ++own.time);
    memory = Use{device, stream, epoch_, bytes, data, {}, {}};
    memory.accesses.push_back({{own.slot, own.time}, 0, bytes, true,
                               std::make_shared<const std::string>("the allocation on " + own.name)});
    live_[device] += bytes;
  }

  void freed(Use& memory) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    live_[memory.device] -= memory.bytes;
    if (memory.epoch != epoch_) return;
    Stream& own = of(memory.device, memory.stream);
    Stream::Freed rest{std::to_string(memory.bytes) + " bytes", {}};
    for (const Access& access : memory.accesses)
      if (access.when.slot != own.slot && !memory.kept_for.count(streams_[access.when.slot]->id)) {
        rest.uses.push_back(access);
        rest.what = std::to_string(memory.bytes) + " bytes freed after " + *memory.accesses.back().what;
      }
    if (!rest.uses.empty()) own.freed.push_back(std::move(rest));
  }

  void keep_for(Use& memory, int64_t stream) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    memory.kept_for.insert(stream);
  }

  void record(Event& event, int device, int64_t stream, double milliseconds) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    Stream& own = of(device, stream);
    own.known.join(host_);
    event = Event{epoch_, true, {own.slot, own.time}, own.known, milliseconds};
  }

  void wait(const Event& event, int device, int64_t stream) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    if (event.recorded && event.epoch == epoch_) of(device, stream).known.join(event.known);
  }

  void wait(int device, int64_t stream, int other_device, int64_t other) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    Clock known = of(other_device, other).known;
    of(device, stream).known.join(known);
  }

  void host_waits(const Event& event) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    if (event.recorded && event.epoch == epoch_) host_knows(event.known);
  }

  void host_waits(int device, int64_t stream) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    host_knows(Clock(of(device, stream).known));
  }

  void host_waits(int device) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    Clock all;
    for (const auto& stream : streams_)
      if (stream->device == device) all.join(stream->known);
    host_knows(all);
  }

  // Whether the host sees that the event has happened: always, or on a slow device when it has waited for what came
  // later, or has looked a few times.
  bool seen(Event& event) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    if (!event.recorded || event.epoch != epoch_) return true;
    if (slow_ && event.when.time > host_.at(event.when.slot) && ++event.asked < 4) return false;
    host_knows(event.known);
    return true;
  }

  bool idle(int device, int64_t stream) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    Stream& own = of(device, stream);
    if (slow_ && own.time > host_.at(own.slot)) return false;
    host_knows(Clock(own.known));
    return true;
  }

  // Pinned memory. A copy to it without waiting arrives when the host waits for it; until then there is rubbish. A copy
  // from it without waiting must find it unchanged until then.
  void add_pinned(Use& memory, char* data, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    memory = Use{-1, 0, epoch_, bytes, data, {}, {}};
    pinned_[data] = &memory;
  }

  void drop_pinned(Use& memory) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    settle(memory, 0, memory.bytes, true, false);
    pinned_.erase(memory.data);
  }

  Use* pinned_at(const void* pointer) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto found = pinned_.upper_bound((char*)pointer);
    if (found == pinned_.begin()) return nullptr;
    Use* memory = (--found)->second;
    return (char*)pointer < memory->data + memory->bytes ? memory : nullptr;
  }

  void arrives_late(Use& memory, const Work& work, size_t low, size_t high) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    char* at = memory.data + low;
    late_.push_back({&memory, low, std::vector<char>(at, at + (high - low)), work.when, work.what, true});
    std::memset(at, 0xFF, high - low);  // a NaN in every type of float
  }

  void is_read(Use& memory, const Work& work, size_t low, size_t high) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    char* at = memory.data + low;
    late_.push_back({&memory, low, std::vector<char>(at, at + (high - low)), work.when, work.what, false});
  }

  void rename(int device, int64_t stream, std::string name) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    of(device, stream).name = std::move(name);
  }

  std::vector<std::string> problems() {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    std::vector<std::string> found;
    found.swap(problems_);
    return found;
  }

  // As if all work had ended: clocks begin anew.
  void reset() {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    Clock all;
    for (const auto& stream : streams_) all.join(stream->known);
    host_knows(all);
    ++epoch_;
    host_.clear();
    streams_.clear();
    slots_.clear();
    problems_.clear();
    late_.clear();
    works_ = 0;
    slow_ = false;
  }

  void slow(bool on) { slow_ = on; }
  int64_t works() const { return works_; }
  int64_t live(int device) { return live_[device]; }

 private:
  struct Late {
    Use* memory;
    size_t low;
    std::vector<char> bytes;
    Moment when;
    Text what;
    bool arrives;
  };

  Stream& of(int device, int64_t id) {
    auto [found, fresh] = slots_.try_emplace({device, id}, streams_.size());
    if (fresh) {
      std::string name = (id ? "stream " + std::to_string(id) : std::string("default stream")) + " of " +
                         std::to_string(device);
      streams_.push_back(std::make_unique<Stream>(Stream{device, id, found->second, name}));
    }
    return *streams_[found->second];
  }

  void renew(Use& memory) {
    if (memory.epoch == epoch_) return;
    memory.epoch = epoch_;
    memory.accesses.clear();
    memory.kept_for.clear();
  }

  void host_knows(const Clock& known) {
    host_.join(known);
    if (late_.empty()) return;
    std::vector<Late> rest;
    for (Late& late : late_)
      if (late.when.time <= host_.at(late.when.slot)) end(late);
      else rest.push_back(std::move(late));
    late_ = std::move(rest);
  }

  void end(const Late& late) {
    char* at = late.memory->data + late.low;
    if (late.arrives) std::memcpy(at, late.bytes.data(), late.bytes.size());
    else if (std::memcmp(at, late.bytes.data(), late.bytes.size()))
      problem("host: pinned memory changed while " + *late.what + " still read it");
  }

  // A device uses pinned memory: what was on its way there has arrived, by the order of streams, which is checked apart.
  void settle_written(Use& memory, size_t low, size_t high, bool write) { settle(memory, low, high, write, true); }

  void settle(Use& memory, size_t low, size_t high, bool write, bool deliver) {
    std::vector<Late> rest;
    for (Late& late : late_) {
      bool meets = late.memory == &memory && late.low < high && low < late.low + late.bytes.size();
      if (!meets || (!late.arrives && !write)) rest.push_back(std::move(late));
      else if (!late.arrives || deliver) end(late);
    }
    late_ = std::move(rest);
  }

  void problem(std::string text) {
    if (problems_.size() < 200) problems_.push_back(std::move(text));
  }

  std::recursive_mutex lock_;
  std::map<std::pair<int, int64_t>, size_t> slots_;
  std::vector<std::unique_ptr<Stream>> streams_;
  Clock host_;
  uint64_t epoch_ = 1;
  std::vector<std::string> problems_;
  std::map<char*, Use*> pinned_;
  std::vector<Late> late_;
  std::map<int, int64_t> live_;
  int64_t works_ = 0;
  bool slow_ = false;
};

}  // namespace standin

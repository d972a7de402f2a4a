#include "names.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire.h"

namespace phub {
namespace {

constexpr size_t kMaxName = 4096;   // bytes

template <class Wire>
std::vector<std::byte> encode(const Wire& wire, const std::string& text) {
  std::vector<std::byte> payload(sizeof wire + text.size());
  std::memcpy(payload.data(), &wire, sizeof wire);
  if (!text.empty()) std::memcpy(payload.data() + sizeof wire, text.data(), text.size());
  return payload;
}

}  // namespace

void Remote::open(uint32_t use, const Spec& spec) { announced_.push_back({use, spec}); }

std::vector<Remote::EarlyFrame> Remote::take(uint32_t use) {
  std::vector<EarlyFrame> taken;
  while (!early_.empty() && early_.front().use <= use) {
    taken.push_back(std::move(early_.front()));
    early_.pop_front();
  }
  return taken;
}

const Spec* Remote::spec(uint32_t use) const {
  const Spec* found = nullptr;
  for (const Announced& announced : announced_)
    if (announced.from_use <= use) found = &announced.spec;
  return found;
}

void Remote::forget_before(uint32_t use) {
  while (announced_.size() > 1 && announced_[1].from_use <= use) announced_.pop_front();
}

std::vector<std::byte> encode_open(const Spec& spec, const std::string& name) {
  if (name.size() > kMaxName)
    throw Error(ErrorCode::config, "[mesh] expected a name of at most " + std::to_string(kMaxName) +
                                       " bytes, got " + std::to_string(name.size()));
  const OpenWire wire{spec.count,
                      spec.part_count,
                      spec.algorithm,
                      spec.prescale,
                      spec.postscale,
                      spec.root,
                      static_cast<uint8_t>(spec.kind),
                      static_cast<uint8_t>(spec.dtype),
                      static_cast<uint8_t>(spec.op),
                      0};
  return encode(wire, name);
}

Spec decode_open(const std::byte* payload, size_t length, std::string& name) {
  OpenWire wire;
  if (length < sizeof wire || length > sizeof wire + kMaxName)
    throw Error(ErrorCode::protocol,
                "[mesh] an open frame of " + std::to_string(length) + " bytes");
  std::memcpy(&wire, payload, sizeof wire);
  name.assign(reinterpret_cast<const char*>(payload) + sizeof wire, length - sizeof wire);
  if (wire.kind > static_cast<uint8_t>(CollectiveKind::barrier) || wire.dtype >= kDTypes ||
      wire.op >= kReduceOps)
    throw Error(ErrorCode::protocol, "[mesh] an open frame of '" + name + "' has unknown fields");
  Spec spec;
  spec.kind = static_cast<CollectiveKind>(wire.kind);
  spec.dtype = static_cast<DType>(wire.dtype);
  spec.op = static_cast<ReduceOp>(wire.op);
  spec.root = wire.root;
  spec.count = wire.count;
  spec.part_count = wire.part_count;
  spec.algorithm = wire.algorithm;
  spec.prescale = wire.prescale;
  spec.postscale = wire.postscale;
  return spec;
}

}  // namespace phub

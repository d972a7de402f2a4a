// The wire format; it stands here once. All integers little-endian, as the host has them.
//
//   lane     := frame*                       (after the handshake, which is Python's: see docs)
//   frame    := header payload
//   header   := kind:u8 flags:u8 sender:u16 id:u32 step:u32 length:u32          (16 bytes)
//   payload  := byte{length}
//
// Worker -> core of a PBox (sender = rank; id = chunk unless said otherwise):
//   push        payload = the chunk's elements, or in a table with a compression their packed
//               form; flag no_grad: no payload, counts as zeros; flag init: the payload, never
//               packed, becomes the weights (only the root sends one)
//   push_key    id = key; all chunks of that key on this lane's core stand in the shared arena;
//               same flags; length 0
//   pull        id = chunk: answer at once with the current weights (server optimizer only)
//   hyper       id = parameter group; payload = HyperWire; holds for all later pushes of this rank
//   state       id = chunk; flags = array (0: the weights, then the optimizer's state) + 16 x part,
//               of arrays in the accumulator's type, in parts of the chunk's length (16-bit keys
//               have two). length 0: asks for it; else payload = the array, step = steps that the
//               state has in it: from now on it is this (server optimizer only)
//   commit, skip, join                       reserved (hold=True, uneven batches)
// Core -> worker:
//   result      payload = the chunk's new elements; or length 0 and
//               flag in_answer: they stand in the shared answer memory `step mod 2`,
//               flag arena: the key `id` is answered, all of its chunks on this core stand in
//               the shared arena
//   state       the answer to one that asked, with id and flags of that one
// Worker -> worker (how they are used stands in mesh.h):
//   open        id = sender's number for a name; step = first use it holds for; payload =
//               OpenWire + name
//   posted      id = sender's number; step = use: the sender has submitted that use and can take
//               its data
//   data        id = sender's number; step = use; sender = part. The payload continues that part's
//               receives from this sender, in the order of the schedule
// Packed forms of n elements of fp32 (what they mean stands in kernels/packed.h); t and share are
// the table's:
//   f16, bf16   := half{n}
//   two_bit     := word{ceil(n/16)}              11 = t, 10 = -t, 00 = 0; from the upper bits of
//                                                the first byte on
//   one_bit     := scale:f32 word{ceil(n/32)}    1 = scale, 0 = -scale; from the lowest bit on
//   top_k       := index:u32{k} value:f32{k}     k = max(1, floor(share*n)); indices rise
// Either way:
//   error       payload = ErrorWire + text; the job is over. Between workers: id = sender's number,
//               step = use; the sender has failed that use and does nothing more for it
//   bye         orderly end: what closes after this is no loss
#pragma once

#include <cstdint>

namespace phub {

enum class FrameKind : uint8_t {
  push = 1,
  push_key = 2,
  pull = 3,
  hyper = 4,
  commit = 5,
  skip = 6,
  join = 7,
  result = 8,
  state = 9,
  open = 16,
  posted = 17,
  data = 18,
  error = 32,
  bye = 33,
};

namespace flag {
inline constexpr uint8_t no_grad = 1;
inline constexpr uint8_t init = 2;
inline constexpr uint8_t arena = 4;
inline constexpr uint8_t in_answer = 8;
}  // namespace flag

// The flags of a `state` frame.
struct StatePart {
  uint8_t array, part;

  explicit StatePart(uint8_t flags) : array(flags % 16), part(flags / 16) {}
  StatePart(uint8_t array, uint8_t part) : array(array), part(part) {}
  uint8_t flags() const { return static_cast<uint8_t>(array + 16 * part); }
};

struct Header {
  FrameKind kind;
  uint8_t flags;
  uint16_t sender;
  uint32_t id;
  uint32_t step;
  uint32_t length;  // bytes of payload
};
static_assert(sizeof(Header) == 16);

// Of the fields that the rule has no use for, all are 0.
struct HyperWire {
  enum : uint32_t { sgd = 0, adam = 1 };  // rule
  enum : uint32_t { maximize = 1, nesterov = 2, amsgrad = 4, decoupled = 8 };  // options
  uint32_t rule, options;
  double lr, weight_decay;
  double momentum, dampening;  // sgd
  double beta1, beta2, eps;  // adam
};
static_assert(sizeof(HyperWire) == 64);

struct ErrorWire {
  int32_t code;  // ErrorCode
  int32_t rank;
};

// What a collective does, as one rank was told; ranks must agree. The name follows.
struct OpenWire {
  uint64_t count, part_count;  // elements of the whole and of a part
  uint64_t algorithm;  // hash of the schedule's name
  double prescale, postscale;
  int32_t root;
  uint8_t kind, dtype, op, reserved;
};
static_assert(sizeof(OpenWire) == 48);

// Lengths above this are refused on every lane, whatever the sender claims.
inline constexpr uint32_t kMaxPayload = 8u << 20;

}  // namespace phub

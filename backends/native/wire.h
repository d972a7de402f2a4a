// The wire format; it stands here once. All integers little-endian, as the host has them.
//
//   lane     := frame*                       (after the handshake, which is Python's: see docs)
//   frame    := header payload
//   header   := kind:u8 flags:u8 sender:u16 id:u32 step:u32 length:u32          (16 bytes)
//   payload  := byte{length}
//
// Worker -> core of a PBox (sender = rank; id = chunk unless said otherwise):
//   push        payload = the chunk's elements; flag no_grad: no payload, counts as zeros;
//               flag init: the payload becomes the weights (only the root sends one)
//   push_key    id = key; all chunks of that key on this lane's core stand in the shared arena;
//               same flags; length 0
//   pull        id = chunk: answer at once with the current weights (server optimizer only)
//   hyper       id = parameter group; payload = HyperWire; holds for all later pushes of this rank
//   commit, skip, join                       reserved (hold=True, uneven batches)
// Core -> worker:
//   result      payload = the chunk's new elements; or length 0 and
//               flag in_answer: they stand in the shared answer memory `step mod 2`,
//               flag arena: the key `id` is answered, all of its chunks on this core stand in
//               the shared arena
// Worker -> worker (how they are used stands in mesh.h):
//   open        id = sender's number for a name; step = first use it holds for; payload =
//               OpenWire + name
//   posted      id = sender's number; step = use: the sender has submitted that use and can take
//               its data
//   data        id = sender's number; step = use; sender = part. The payload continues that part's
//               receives from this sender, in the order of the schedule
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

struct Header {
  FrameKind kind;
  uint8_t flags;
  uint16_t sender;
  uint32_t id;
  uint32_t step;
  uint32_t length;  // bytes of payload
};
static_assert(sizeof(Header) == 16);

struct HyperWire {
  double lr, momentum, dampening, weight_decay;
  uint32_t nesterov, maximize;
};
static_assert(sizeof(HyperWire) == 40);

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

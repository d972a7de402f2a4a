// What all lanes have in common: the queue of frames that could not leave yet, and the end.
#include "lane.h"

#include <cstring>

namespace phub {
namespace {

bool is_known(FrameKind kind) {
  switch (kind) {
    case FrameKind::push:
    case FrameKind::push_key:
    case FrameKind::pull:
    case FrameKind::hyper:
    case FrameKind::commit:
    case FrameKind::skip:
    case FrameKind::join:
    case FrameKind::result:
    case FrameKind::state:
    case FrameKind::open:
    case FrameKind::posted:
    case FrameKind::data:
    case FrameKind::error:
    case FrameKind::bye:
      return true;
  }
  return false;
}

}  // namespace

void check_header(const Header& header, size_t max_payload) {
  if (!is_known(header.kind))
    throw Error(ErrorCode::protocol, "[lane] expected a frame, got unknown kind " +
                                         std::to_string(static_cast<int>(header.kind)) +
                                         "; the lane is closed");
  if (header.length > max_payload)
    throw Error(ErrorCode::protocol, "[lane] expected at most " + std::to_string(max_payload) +
                                         " bytes of payload, got a frame of " +
                                         std::to_string(header.length) + "; the lane is closed");
}

Lane::~Lane() { drop_queue(); }

void Lane::send_copy(const Header& header, const void* payload) {
  while (!copies_.empty() && copies_.front().unsent == 0) copies_.pop_front();
  Copy& copy = copies_.emplace_back();
  copy.data = std::make_unique<std::byte[]>(header.length);
  if (header.length > 0) std::memcpy(copy.data.get(), payload, header.length);
  send(header, copy.data.get(), &copy.unsent);
}

void Lane::enqueue(const Header& header, const void* payload, size_t* unsent) {
  queue_.push_back({header, static_cast<const std::byte*>(payload), unsent});
  if (unsent) ++*unsent;
}

void Lane::dequeue() {
  if (queue_.front().unsent) --*queue_.front().unsent;
  queue_.pop_front();
}

void Lane::drop_queue() {
  while (!queue_.empty()) dequeue();
}

void Lane::close(const Error& why, Sink& sink) {
  if (closed_) return;
  closed_ = true;
  drop_queue();
  shut_down();
  sink.closed(*this, why);
}

}  // namespace phub

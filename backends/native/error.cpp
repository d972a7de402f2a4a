#include "error.h"

#include <cerrno>
#include <cstring>
#include <system_error>

#include "wire.h"

namespace phub {
namespace {

constexpr size_t kMaxText = 4096;  // bytes; no lane takes less

ErrorCode classify(int number) {
  switch (number) {
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENOTCONN:
      return ErrorCode::peer_lost;
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
      return ErrorCode::config;  // a limit of this machine, not a defect of this library
    default:
      return ErrorCode::internal;
  }
}

}  // namespace

std::vector<std::byte> pack_error(const Error& error) {
  const std::string text = std::string(error.what()).substr(0, kMaxText);
  const ErrorWire head{static_cast<int32_t>(error.code), error.rank};
  std::vector<std::byte> payload(sizeof head + text.size());
  std::memcpy(payload.data(), &head, sizeof head);
  std::memcpy(payload.data() + sizeof head, text.data(), text.size());
  return payload;
}

Error unpack_error(const std::byte* payload, size_t length) {
  ErrorWire head;
  if (length < sizeof head)
    throw Error(ErrorCode::protocol,
                "[lane] an error frame of " + std::to_string(length) + " bytes");
  std::memcpy(&head, payload, sizeof head);
  const bool known = head.code >= static_cast<int32_t>(ErrorCode::config) &&
                     head.code <= static_cast<int32_t>(ErrorCode::internal);
  const ErrorCode code = known ? static_cast<ErrorCode>(head.code) : ErrorCode::internal;
  const auto* text = reinterpret_cast<const char*>(payload + sizeof head);
  return Error(code, std::string(text, length - sizeof head), head.rank);
}

Error system_error(const std::string& what, int number) {
  return Error(classify(number), what + ": " + std::generic_category().message(number));
}

}  // namespace phub

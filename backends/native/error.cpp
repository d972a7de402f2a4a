#include "error.h"

#include <cerrno>
#include <system_error>

namespace phub {
namespace {

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

Error system_error(const std::string& what, int number) {
  return Error(classify(number), what + ": " + std::generic_category().message(number));
}

}  // namespace phub

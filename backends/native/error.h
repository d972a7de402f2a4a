// Errors of the native core. Recoverable ones are thrown or carried as values with a code, a rank
// and a text; module.cpp turns them into the classes of phub_collective.errors in one place.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace phub {

enum class ErrorCode : int {
  config = 1,
  mismatch = 2,
  duplicate = 3,
  peer_lost = 4,
  timeout = 5,
  auth = 6,
  protocol = 7,
  internal = 8,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text, int rank = -1)
      : std::runtime_error(text), code(code), rank(rank) {}
  ErrorCode code;
  int rank;  // the rank it is about, -1: none or the server
};

// The payload of an error frame (ErrorWire and the text, cut to fit in every lane), and back.
std::vector<std::byte> pack_error(const Error& error);
Error unpack_error(const std::byte* payload,
                   size_t length);  // throws Error(protocol) if it is none

// errno of a failed call as an Error: "[lane] mmap: Cannot allocate memory".
Error system_error(const std::string& what, int number);

}  // namespace phub

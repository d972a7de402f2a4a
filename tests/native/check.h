// A minimal test harness: TEST(name) { ... CHECK(...) ... }, and main() runs all of them, or those
// whose names are given.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "\n%s:%d: %s\n", file, line, what.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

inline int run(int argc, char** argv) {
  for (const Case& test : cases()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted |= std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    std::printf("%-44s", test.name);
    std::fflush(stdout);
    const auto start = std::chrono::steady_clock::now();
    try {
      test.run();
    } catch (const std::exception& error) {
      fail(test.name, 0, std::string("unexpected exception: ") + error.what());
    }
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    std::printf("ok %8.1f ms\n", took.count());
  }
  return 0;
}

// The error that `action` throws; a test fails when it throws none.
template <class E>
E thrown(const char* file, int line, const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error;
  }
  fail(file, line, "expected an exception, got none");
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace test

#define TEST(name)                                                 \
  static void test_##name();                                       \
  static const test::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) \
  if (!(condition)) test::fail(__FILE__, __LINE__, "expected " #condition)

#define CHECK_EQUAL(a, b)        \
  if (!((a) == (b)))             \
  test::fail(__FILE__, __LINE__, \
             "expected " #a " == " #b ", got " + std::to_string(a) + " and " + std::to_string(b))

#define CHECK_CONTAINS(text, part)     \
  if (!test::contains((text), (part))) \
  test::fail(__FILE__, __LINE__, std::string("expected '") + (part) + "' in '" + (text) + "'")

#define THROWN(E, ...) test::thrown<E>(__FILE__, __LINE__, [&] { __VA_ARGS__; })

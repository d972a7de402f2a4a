// Python bindings of the kernels, for tests and benchmarks. Arrays are uint8 views of the memory;
// types and operations are the numbers of DType and ReduceOp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "error.h"
#include "kernels/bench.h"
#include "kernels/cpu.h"
#include "kernels/packed.h"

namespace py = pybind11;
using namespace phub;

namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::config, "[kernels] expected " + text);
}

void require_size(const Bytes& array, size_t bytes) {
  const auto size = static_cast<size_t>(array.size());
  if (size != bytes) refuse(std::to_string(bytes) + " bytes, got " + std::to_string(size));
}

const void* input(const Bytes& array, size_t bytes) {
  require_size(array, bytes);
  return array.data();
}

void* output(const Bytes& array, size_t bytes) {
  require_size(array, bytes);
  if (!array.writeable()) refuse("a writable array");
  return const_cast<uint8_t*>(array.data());
}

std::vector<const void*> inputs(const std::vector<Bytes>& arrays, size_t bytes) {
  std::vector<const void*> pointers;
  for (const Bytes& array : arrays) pointers.push_back(input(array, bytes));
  return pointers;
}

std::vector<void*> outputs(const std::vector<Bytes>& arrays, size_t bytes) {
  std::vector<void*> pointers;
  for (const Bytes& array : arrays) pointers.push_back(output(array, bytes));
  return pointers;
}

DType to_dtype(int number) {
  if (number < 0 || number >= kDTypes) refuse("a DType, got " + std::to_string(number));
  return static_cast<DType>(number);
}

ReduceOp to_op(int number) {
  if (number < 0 || number >= kReduceOps) refuse("a ReduceOp, got " + std::to_string(number));
  return static_cast<ReduceOp>(number);
}

Execution make_execution(std::optional<Isa> isa, bool streaming) {
  return {isa.value_or(best_isa()), streaming ? Stores::streaming : Stores::cached};
}

void bind_types(py::module_& m) {
  py::enum_<Isa>(m, "Isa")
      .value("BASELINE", Isa::baseline)
      .value("AVX2", Isa::avx2)
      .value("AVX512", Isa::avx512);
  m.def("has_isa", &has_isa, py::arg("isa"));
  m.def("best_isa", &best_isa);
  py::class_<Scale>(m, "Scale")
      .def(py::init<double, double, int>(), py::arg("pre") = 1.0, py::arg("post") = 1.0,
           py::arg("divisor") = 1);
  py::class_<Execution>(m, "Execution")
      .def(py::init(&make_execution), py::arg("isa") = py::none(), py::arg("streaming") = false);
  py::class_<SgdParams>(m, "SgdParams")
      .def(py::init<double, double, double, double, bool, bool>(), py::arg("lr"),
           py::arg("momentum") = 0.0, py::arg("dampening") = 0.0, py::arg("weight_decay") = 0.0,
           py::arg("nesterov") = false, py::arg("maximize") = false)
      .def_readonly("lr", &SgdParams::lr)
      .def_readonly("momentum", &SgdParams::momentum)
      .def_readonly("dampening", &SgdParams::dampening)
      .def_readonly("weight_decay", &SgdParams::weight_decay)
      .def_readonly("nesterov", &SgdParams::nesterov)
      .def_readonly("maximize", &SgdParams::maximize);
  py::class_<AdamParams>(m, "AdamParams")
      .def(py::init<double, double, double, double, double, bool, bool, bool>(), py::arg("lr"),
           py::arg("beta1") = 0.9, py::arg("beta2") = 0.999, py::arg("eps") = 1e-8,
           py::arg("weight_decay") = 0.0, py::arg("amsgrad") = false, py::arg("decoupled") = false,
           py::arg("maximize") = false)
      .def_readonly("lr", &AdamParams::lr)
      .def_readonly("beta1", &AdamParams::beta1)
      .def_readonly("beta2", &AdamParams::beta2)
      .def_readonly("eps", &AdamParams::eps)
      .def_readonly("weight_decay", &AdamParams::weight_decay)
      .def_readonly("amsgrad", &AdamParams::amsgrad)
      .def_readonly("decoupled", &AdamParams::decoupled)
      .def_readonly("maximize", &AdamParams::maximize);
}

// The arrays of a step of `count` elements of type t; `to`: its outputs.
StepArrays step_arrays(DType t, size_t count, const Bytes& weights_in, const Bytes& weights_out,
                       const std::vector<Bytes>& state, const std::vector<void*>& to) {
  if (state.size() > kMaxStates)
    refuse("at most 3 arrays of state, got " + std::to_string(state.size()));
  const size_t wide = count * item_size(accumulator_type(t));
  StepArrays arrays{input(weights_in, wide),
                    output(weights_out, wide),
                    {},
                    to.data(),
                    static_cast<int>(to.size())};
  for (size_t s = 0; s < state.size(); ++s) arrays.state[s] = output(state[s], wide);
  return arrays;
}

void bind_reductions(py::module_& m) {
  m.def(
      "reduce",
      [](int dtype, int op, const std::vector<Bytes>& outs, const std::vector<Bytes>& in,
         const Scale& scale, const Execution& execution) {
        if (in.empty()) refuse("at least one input, got none");
        const auto bytes = static_cast<size_t>(in[0].size());
        const auto from = inputs(in, bytes);
        const auto to = outputs(outs, bytes);
        const DType t = to_dtype(dtype);
        const ReduceOp reduction = to_op(op);
        const py::gil_scoped_release release;
        reduce(t, reduction, to.data(), static_cast<int>(to.size()), from.data(),
               static_cast<int>(from.size()), bytes / item_size(t), scale, execution);
      },
      py::arg("dtype"), py::arg("op"), py::arg("outs").noconvert(), py::arg("inputs").noconvert(),
      py::arg("scale") = Scale{}, py::arg("execution") = Execution{});
  m.def(
      "fold",
      [](int dtype, int op, const Bytes& acc, const Bytes& in, bool first, const Scale& scale,
         const Execution& execution) {
        const DType t = to_dtype(dtype);
        const size_t count = static_cast<size_t>(in.size()) / item_size(t);
        void* const to = output(acc, count * item_size(accumulator_type(t)));
        const void* const from = in.data();
        const ReduceOp reduction = to_op(op);
        const py::gil_scoped_release release;
        fold(t, reduction, to, from, count, first, scale, execution);
      },
      py::arg("dtype"), py::arg("op"), py::arg("acc").noconvert(), py::arg("input").noconvert(),
      py::arg("first"), py::arg("scale") = Scale{}, py::arg("execution") = Execution{});
  m.def(
      "finish",
      [](int dtype, int op, const Bytes& out, const Bytes& acc, const Scale& scale,
         const Execution& execution) {
        const DType t = to_dtype(dtype);
        const size_t count = static_cast<size_t>(out.size()) / item_size(t);
        void* const to = output(out, count * item_size(t));
        const void* const from = input(acc, count * item_size(accumulator_type(t)));
        const ReduceOp reduction = to_op(op);
        const py::gil_scoped_release release;
        finish(t, reduction, to, from, count, scale, execution);
      },
      py::arg("dtype"), py::arg("op"), py::arg("out").noconvert(), py::arg("acc").noconvert(),
      py::arg("scale") = Scale{}, py::arg("execution") = Execution{});
}

void bind_steps(py::module_& m) {
  m.def(
      "step",
      [](int dtype, const Update& update, const Bytes& weights_in, const Bytes& weights_out,
         const std::vector<Bytes>& state, const std::vector<Bytes>& outs, const Bytes& acc,
         const Scale& scale, uint32_t taken, const Execution& execution) {
        const DType t = to_dtype(dtype);
        const size_t count = static_cast<size_t>(acc.size()) / item_size(accumulator_type(t));
        const auto to = outputs(outs, count * item_size(t));
        const auto arrays = step_arrays(t, count, weights_in, weights_out, state, to);
        const void* const sum = acc.data();
        const py::gil_scoped_release release;
        step(t, update, arrays, sum, count, scale, taken, execution);
      },
      py::arg("dtype"), py::arg("update"), py::arg("weights_in").noconvert(),
      py::arg("weights_out").noconvert(), py::arg("state").noconvert(), py::arg("outs").noconvert(),
      py::arg("acc").noconvert(), py::arg("scale"), py::arg("taken"),
      py::arg("execution") = Execution{});
  m.def(
      "reduce_step",
      [](int dtype, const Update& update, const Bytes& weights_in, const Bytes& weights_out,
         const std::vector<Bytes>& state, const std::vector<Bytes>& outs,
         const std::vector<Bytes>& in, const Scale& scale, uint32_t taken,
         const Execution& execution) {
        const DType t = to_dtype(dtype);
        if (in.empty()) refuse("at least one input, got none");
        const size_t count = static_cast<size_t>(in[0].size()) / item_size(t);
        const auto from = inputs(in, count * item_size(t));
        const auto to = outputs(outs, count * item_size(t));
        const auto arrays = step_arrays(t, count, weights_in, weights_out, state, to);
        const py::gil_scoped_release release;
        reduce_step(t, update, arrays, from.data(), static_cast<int>(from.size()), count, scale,
                    taken, execution);
      },
      py::arg("dtype"), py::arg("update"), py::arg("weights_in").noconvert(),
      py::arg("weights_out").noconvert(), py::arg("state").noconvert(), py::arg("outs").noconvert(),
      py::arg("inputs").noconvert(), py::arg("scale"), py::arg("taken"),
      py::arg("execution") = Execution{});
}

Compression to_compression(int packing, double parameter) {
  const Compression compression{static_cast<Packing>(packing), parameter};
  if (packing < 0 || packing > UINT8_MAX || !compression.packs() || !compression.is_valid())
    refuse("a packing and its parameter, got " + std::to_string(packing) + " and " +
           std::to_string(parameter));
  return compression;
}

void bind_packing(py::module_& m) {
  m.def(
      "packed_bytes",
      [](int packing, double parameter, size_t count) {
        return packed_bytes(to_compression(packing, parameter), count);
      },
      py::arg("packing"), py::arg("parameter"), py::arg("count"));
  m.def(
      "pack",
      [](int packing, double parameter, const Bytes& out, const Bytes& residual,
         const Bytes& gradient) {
        const Compression compression = to_compression(packing, parameter);
        const auto bytes = static_cast<size_t>(gradient.size());
        const size_t count = bytes / sizeof(float);
        pack(compression, output(out, packed_bytes(compression, count)), output(residual, bytes),
             gradient.data(), count);
      },
      py::arg("packing"), py::arg("parameter"), py::arg("out").noconvert(),
      py::arg("residual").noconvert(), py::arg("gradient").noconvert());
  m.def(
      "fold_packed",
      [](int packing, double parameter, const Bytes& acc, const Bytes& form, bool first,
         double pre) {
        const Compression compression = to_compression(packing, parameter);
        const size_t count = static_cast<size_t>(acc.size()) / sizeof(float);
        return fold_packed(compression, output(acc, count * sizeof(float)),
                           input(form, packed_bytes(compression, count)), count, first, pre);
      },
      py::arg("packing"), py::arg("parameter"), py::arg("acc").noconvert(),
      py::arg("form").noconvert(), py::arg("first"), py::arg("pre"));
}

using Optional = std::optional<Bytes>;

std::vector<std::vector<double>> timed_walk(Walk what, int dtype, const std::vector<Bytes>& in,
                                            const Optional& out, const Optional& weights,
                                            const std::vector<Bytes>& state, size_t chunk_bytes,
                                            size_t slice, int threads, bool streaming) {
  if (in.empty() || in.size() > 8) refuse("1 to 8 inputs, got " + std::to_string(in.size()));
  if (what == Walk::triad && in.size() < 2) refuse("two inputs for a triad");
  const size_t states = what == Walk::sgd ? 1 : what == Walk::adam ? 2 : 0;
  if (what != Walk::read && !out) refuse("an output");
  if (state.size() != states || (states > 0 && !weights))
    refuse("weights and " + std::to_string(states) + " arrays of state");
  if (threads < 1) refuse("at least one thread, got " + std::to_string(threads));
  if (chunk_bytes == 0 || chunk_bytes % 128 != 0 || slice == 0)
    refuse("chunks of a multiple of 128 bytes");
  const DType t = to_dtype(dtype);
  if (t != DType::f32 && t != DType::f64) refuse("float32 or float64");
  WalkArrays arrays;
  arrays.bytes = static_cast<size_t>(in[0].size());
  arrays.in = inputs(in, arrays.bytes);
  if (out) arrays.out = output(*out, arrays.bytes);
  if (weights) arrays.weights = input(*weights, arrays.bytes);
  for (const Bytes& array : state) arrays.state.push_back(output(array, arrays.bytes));
  const py::gil_scoped_release release;
  return walk(what, t, arrays, {chunk_bytes, slice, threads},
              streaming ? Stores::streaming : Stores::cached);
}

std::vector<double> timed_aggregation(Way way, const std::vector<Bytes>& in, const Bytes& out,
                                      const Bytes& weights, const Bytes& momentum,
                                      const Bytes& merged, const std::vector<size_t>& keys,
                                      size_t chunk_bytes, int threads, bool streaming, int rounds) {
  if (in.empty() || in.size() > 8) refuse("1 to 8 inputs, got " + std::to_string(in.size()));
  if (threads < 1 || rounds < 1 || chunk_bytes % 64 || !chunk_bytes)
    refuse("at least one thread and round, and chunks of a multiple of 64 bytes");
  WalkArrays arrays;
  arrays.bytes = static_cast<size_t>(in[0].size());
  size_t total = 0;
  for (const size_t bytes : keys) {
    if (bytes % 64) refuse("keys of a multiple of 64 bytes, got " + std::to_string(bytes));
    total += bytes;
  }
  if (!total || total > arrays.bytes)
    refuse("keys of at most " + std::to_string(arrays.bytes) + " bytes, got " +
           std::to_string(total));
  arrays.in = inputs(in, arrays.bytes);
  arrays.out = output(out, arrays.bytes);
  arrays.weights = input(weights, arrays.bytes);
  arrays.state = {output(momentum, arrays.bytes)};
  void* const sums = output(merged, arrays.bytes);
  const py::gil_scoped_release release;
  return aggregate(way, DType::f32, arrays, sums, keys, {chunk_bytes, 1, threads},
                   streaming ? Stores::streaming : Stores::cached, rounds);
}

void bind_walks(py::module_& m) {
  py::enum_<Way>(m, "Way").value("TALL", Way::tall).value("WIDE", Way::wide);
  m.def("aggregate", &timed_aggregation, py::arg("way"), py::arg("inputs").noconvert(),
        py::arg("out").noconvert(), py::arg("weights").noconvert(), py::arg("momentum").noconvert(),
        py::arg("merged").noconvert(), py::arg("keys"), py::arg("chunk_bytes"), py::arg("threads"),
        py::arg("streaming"), py::arg("rounds"));
  py::enum_<Walk>(m, "Walk")
      .value("READ", Walk::read)
      .value("COPY", Walk::copy)
      .value("TRIAD", Walk::triad)
      .value("REDUCE", Walk::reduce)
      .value("SGD", Walk::sgd)
      .value("ADAM", Walk::adam);
  m.attr("WALK_SGD") = kWalkSgd;
  m.attr("WALK_ADAM") = kWalkAdam;
  m.attr("WALK_TAKEN") = kWalkTaken;
  m.def("walk", &timed_walk, py::arg("what"), py::arg("dtype"), py::arg("inputs").noconvert(),
        py::arg("out").noconvert(), py::arg("weights").noconvert(), py::arg("state").noconvert(),
        py::arg("chunk_bytes"), py::arg("slice"), py::arg("threads"), py::arg("streaming"));
}

}  // namespace

void bind_kernels(py::module_& m) {
  py::module_ kernels = m.def_submodule("kernels", "The arithmetic of a PBox core on CPU.");
  bind_types(kernels);
  bind_reductions(kernels);
  bind_steps(kernels);
  bind_packing(kernels);
  bind_walks(kernels);
}

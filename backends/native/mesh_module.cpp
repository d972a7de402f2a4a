// Python bindings of collectives between workers. Only binds; see module.cpp for the rules.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "mesh.h"

namespace py = pybind11;
using namespace phub;

void bind_mesh(py::module_& m);

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;
using Memory = py::array_t<uint8_t, py::array::c_style>;
// send_to, send begin and end, recv_from, receive begin and end, reduce
using StepTuple = std::tuple<int, size_t, size_t, int, size_t, size_t, bool>;

std::shared_ptr<Plan> make_plan(size_t count, const std::vector<StepTuple>& tuples, bool reduces) {
  std::vector<Step> steps;
  for (const auto& [to, send_begin, send_end, from, recv_begin, recv_end, reduce] : tuples)
    steps.push_back({to, {send_begin, send_end}, from, {recv_begin, recv_end}, reduce});
  return std::make_shared<Plan>(count, std::move(steps), reduces);
}

Spec make_spec(int kind, int dtype, int op, int root, size_t count, size_t part_count,
               uint64_t algorithm, double prescale, double postscale) {
  return {static_cast<CollectiveKind>(kind),
          static_cast<DType>(dtype),
          static_cast<ReduceOp>(op),
          root,
          count,
          part_count,
          algorithm,
          prescale,
          postscale};
}

std::shared_ptr<Operation> submit(Mesh& mesh, const std::string& name, const Spec& spec,
                                  const Memory& memory, std::shared_ptr<Plan> whole,
                                  std::shared_ptr<Plan> last) {
  if (!memory.writeable() ||
      static_cast<size_t>(memory.nbytes()) != spec.count * item_size(spec.dtype))
    throw Error(ErrorCode::config, "[mesh] '" + name + "': expected a writable array of the " +
                                       "operation's size, got " + std::to_string(memory.nbytes()) +
                                       " bytes");
  auto* data = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(memory.data()));
  const py::gil_scoped_release release;
  return mesh.submit(name, spec, data, {std::move(whole), std::move(last)});
}

void attach_shm(Mesh& mesh, int peer, int socket, int memory, int peer_bell, bool first,
                size_t max_payload) {
  mesh.attach(peer, make_shm_lane(socket, memory, peer_bell, first, max_payload));
}

void attach_tcp(Mesh& mesh, int peer, int fd, const TcpOptions& options, size_t max_payload) {
  mesh.attach(peer, make_tcp_lane(fd, options, max_payload));
}

}  // namespace

void bind_mesh(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(py::init(&make_plan), py::arg("count"),
                                                         py::arg("steps"), py::arg("reduces"));
  py::class_<Spec>(m, "MeshSpec")
      .def(py::init(&make_spec), py::kw_only(), py::arg("kind"), py::arg("dtype"), py::arg("op"),
           py::arg("root"), py::arg("count"), py::arg("part_count"), py::arg("algorithm"),
           py::arg("prescale"), py::arg("postscale"));
  py::class_<Operation, std::shared_ptr<Operation>>(m, "MeshOperation");
  py::class_<Mesh>(m, "Mesh")
      .def(py::init([](Engine& engine, int rank, int size, size_t frame_bytes, size_t window) {
             MeshOptions options;
             options.frame_bytes = frame_bytes;
             options.window = window;
             return std::make_unique<Mesh>(engine, rank, size, options);
           }),
           py::arg("engine"), py::arg("rank"), py::arg("size"), py::arg("frame_bytes"),
           py::arg("window"), py::keep_alive<1, 2>())
      .def("attach_shm", &attach_shm, py::arg("peer"), py::arg("socket"), py::arg("memory"),
           py::arg("peer_bell"), py::arg("first"), py::arg("max_payload"), Unlocked())
      .def("attach_tcp", &attach_tcp, py::arg("peer"), py::arg("fd"), py::arg("options"),
           py::arg("max_payload"), Unlocked())
      .def("submit", &submit, py::arg("name"), py::arg("spec"), py::arg("memory").noconvert(),
           py::arg("whole"), py::arg("last"))
      .def("done", &Mesh::done, py::arg("operation"), Unlocked())
      .def("wait", &Mesh::wait, py::arg("operation"), py::arg("timeout_s"), Unlocked())
      .def("missing", &Mesh::missing, py::arg("operation"), Unlocked())
      .def("close", &Mesh::close, py::arg("timeout_s"), Unlocked())
      .def("counters", &Mesh::counters, Unlocked());
}

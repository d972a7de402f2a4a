// Python bindings of the native core. Only binds: named arguments, no conversions of arrays, the
// GIL released where a call can block. Errors become the classes of phub_collective.errors here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "engine.h"
#include "pbox_client.h"
#include "server.h"

namespace py = pybind11;
using namespace phub;

void bind_kernels(py::module_& m);
void bind_mesh(py::module_& m);

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Unlocked = py::call_guard<py::gil_scoped_release>;

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const auto errors = py::module_::import("phub_collective.errors");
    const py::object made =
        errors.attr("from_code")(static_cast<int>(error.code), error.what(), error.rank);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  }
}

std::byte* bytes_of(const Array<uint8_t>& array) {
  if (!array.writeable()) throw Error(ErrorCode::config, "[pbox] expected a writable array");
  return reinterpret_cast<std::byte*>(const_cast<uint8_t*>(array.data()));
}

TableInfo make_table(uint32_t id, uint32_t first_key, uint32_t first_chunk, uint64_t bytes,
                     const Array<uint64_t>& key_offsets, const Array<uint64_t>& key_bytes,
                     const Array<uint8_t>& key_dtypes, const Array<uint32_t>& key_groups,
                     const Array<uint64_t>& chunk_offsets, const Array<uint32_t>& chunk_bytes,
                     const Array<uint32_t>& chunk_keys, const Array<uint16_t>& chunk_cores, int op,
                     double prescale, double postscale, int divisor, bool arena,
                     bool shared_answers, bool server, uint32_t states, bool shared,
                     bool deterministic, std::optional<uint32_t> staleness, bool first_keys_first,
                     int packing, double packing_parameter) {
  TableInfo table;
  table.id = id;
  table.first_key = first_key;
  table.first_chunk = first_chunk;
  table.bytes = bytes;
  table.op = static_cast<ReduceOp>(op);
  table.scale = {prescale, postscale, divisor};
  table.arena = arena;
  table.shared_answers = shared_answers;
  table.server = server;
  table.states = states;
  table.shared = shared;
  table.deterministic = deterministic;
  table.staleness = staleness.value_or(TableInfo::kAsynchronous);
  table.first_keys_first = first_keys_first;
  table.compression = {static_cast<Packing>(packing), packing_parameter};
  for (py::ssize_t i = 0; i < key_offsets.size(); ++i)
    table.keys.push_back({key_offsets.at(i), key_bytes.at(i), static_cast<DType>(key_dtypes.at(i)),
                          key_groups.at(i), 0, 0});
  for (py::ssize_t i = 0; i < chunk_offsets.size(); ++i) {
    const uint32_t key = chunk_keys.at(i);
    table.chunks.push_back({chunk_offsets.at(i), chunk_bytes.at(i), key, chunk_cores.at(i)});
    KeyInfo& owner = table.keys.at(key);
    if (owner.chunks++ == 0) owner.first_chunk = static_cast<uint32_t>(i);
  }
  table.check();
  return table;
}

uint32_t options(std::initializer_list<std::pair<bool, uint32_t>> set) {
  uint32_t bits = 0;
  for (const auto& [is_set, bit] : set) bits |= is_set ? bit : 0;
  return bits;
}

HyperWire make_sgd(double lr, double momentum, double dampening, double weight_decay, bool nesterov,
                   bool maximize) {
  const uint32_t bits = options({{nesterov, HyperWire::nesterov}, {maximize, HyperWire::maximize}});
  return {HyperWire::sgd, bits, lr, weight_decay, momentum, dampening, 0, 0, 0};
}

HyperWire make_adam(double lr, double beta1, double beta2, double eps, double weight_decay,
                    bool amsgrad, bool decoupled, bool maximize) {
  const uint32_t bits = options({{amsgrad, HyperWire::amsgrad},
                                 {decoupled, HyperWire::decoupled},
                                 {maximize, HyperWire::maximize}});
  return {HyperWire::adam, bits, lr, weight_decay, 0, 0, beta1, beta2, eps};
}

TcpOptions tcp_options(const std::string& congestion, int buffer_bytes, int keepalive_s,
                       int unsent_bytes) {
  return {congestion, buffer_bytes, keepalive_s, unsent_bytes};
}

void bind_memory(py::module_& m) {
  py::enum_<Memory::Access>(m, "Access")
      .value("READ_WRITE", Memory::Access::read_write)
      .value("READ_ONLY", Memory::Access::read_only)
      .value("COPY_ON_WRITE", Memory::Access::copy_on_write);
  py::class_<Memory, std::shared_ptr<Memory>>(m, "Memory", py::buffer_protocol())
      .def_buffer([](Memory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.size()));
      })
      .def_static("anonymous", &Memory::anonymous, py::arg("bytes"), Unlocked())
      .def_static("shared", &Memory::shared, py::arg("bytes"), py::arg("others"), Unlocked())
      .def_static("attach", &Memory::attach, py::arg("fd"), py::arg("bytes"), py::arg("access"),
                  Unlocked())
      .def("revert", &Memory::revert, Unlocked())
      .def("release_fd", &Memory::release_fd)
      .def_property_readonly("fd", &Memory::fd);
}

void bind_lanes(py::module_& m) {
  m.def("make_ring_memory", &make_ring_memory, py::arg("ring_bytes"), Unlocked());
  m.def("congestion_control", &congestion_control, py::arg("fd"));
  m.def("choose_congestion", &choose_congestion, py::arg("fd"), py::arg("wanted"));
  py::class_<TcpOptions>(m, "TcpOptions")
      .def(py::init(&tcp_options), py::arg("congestion") = "", py::arg("buffer_bytes") = 0,
           py::arg("keepalive_s") = 30, py::arg("unsent_bytes") = 0);
  py::class_<LaneCounters>(m, "LaneCounters")
      .def_readonly("bytes_sent", &LaneCounters::bytes_sent)
      .def_readonly("bytes_received", &LaneCounters::bytes_received)
      .def_readonly("wakeups", &LaneCounters::wakeups);
  py::class_<Engine>(m, "Engine")
      .def(py::init<int>(), py::arg("spin_us") = 0)
      .def("bell", &Engine::bell);
}

void bind_server(py::module_& m) {
  py::class_<HyperWire>(m, "Hyper")
      .def_static("sgd", &make_sgd, py::kw_only(), py::arg("lr"), py::arg("momentum"),
                  py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"),
                  py::arg("maximize"))
      .def_static("adam", &make_adam, py::kw_only(), py::arg("lr"), py::arg("beta1"),
                  py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("amsgrad"),
                  py::arg("decoupled"), py::arg("maximize"));
  py::class_<TableInfo>(m, "TableInfo")
      .def(py::init(&make_table), py::kw_only(), py::arg("id"), py::arg("first_key"),
           py::arg("first_chunk"), py::arg("bytes"), py::arg("key_offsets").noconvert(),
           py::arg("key_bytes").noconvert(), py::arg("key_dtypes").noconvert(),
           py::arg("key_groups").noconvert(), py::arg("chunk_offsets").noconvert(),
           py::arg("chunk_bytes").noconvert(), py::arg("chunk_keys").noconvert(),
           py::arg("chunk_cores").noconvert(), py::arg("op"), py::arg("prescale"),
           py::arg("postscale"), py::arg("divisor"), py::arg("arena"), py::arg("shared_answers"),
           py::arg("server"), py::arg("states"), py::arg("shared"), py::arg("deterministic"),
           py::arg("staleness").none(true), py::arg("first_keys_first"), py::arg("packing"),
           py::arg("packing_parameter"));
  py::class_<Table, std::shared_ptr<Table>>(m, "Table")
      .def_property_readonly("arenas", [](const Table& table) { return table.arenas; })
      .def_property_readonly("answers",
                             [](const Table& table) {
                               return std::vector<std::shared_ptr<Memory>>(table.answers,
                                                                           table.answers + 2);
                             })
      .def_property_readonly("weights", [](const Table& table) {
        return std::vector<std::shared_ptr<Memory>>(table.weights, table.weights + 2);
      });
  py::class_<JobEvent>(m, "JobEvent")
      .def_readonly("job", &JobEvent::job)
      .def_readonly("rank", &JobEvent::rank)
      .def_readonly("text", &JobEvent::text)
      .def_property_readonly("code",
                             [](const JobEvent& event) { return static_cast<int>(event.code); });
  py::class_<Server>(m, "Server")
      .def(py::init<int, int>(), py::arg("cores"), py::arg("spin_us") = 0)
      .def("add_job", &Server::add_job, py::arg("job"), py::arg("workers"), Unlocked())
      .def("add_table", &Server::add_table, py::arg("job"), py::arg("info"), py::arg("workers"),
           Unlocked())
      .def("drop_table", &Server::drop_table, py::arg("job"), py::arg("table"), Unlocked())
      .def(
          "end_table",
          [](Server& server, uint32_t job, uint32_t table, int code, int rank,
             const std::string& text) {
            server.end_table(job, table, Error(static_cast<ErrorCode>(code), text, rank));
          },
          py::arg("job"), py::arg("table"), py::arg("code"), py::arg("rank"), py::arg("text"),
          Unlocked())
      .def("drop_job", &Server::drop_job, py::arg("job"), Unlocked())
      .def("close_events", &Server::close_events)
      .def(
          "attach_tcp",
          [](Server& server, uint32_t job, int rank, int core, int fd, const TcpOptions& options,
             size_t max_payload) {
            server.attach(job, rank, core, make_tcp_lane(fd, options, max_payload));
          },
          py::arg("job"), py::arg("rank"), py::arg("core"), py::arg("fd"), py::arg("options"),
          py::arg("max_payload"), Unlocked())
      .def(
          "attach_shm",
          [](Server& server, uint32_t job, int rank, int core, int socket, int memory,
             int peer_bell, size_t max_payload) {
            server.attach(job, rank, core,
                          make_shm_lane(socket, memory, peer_bell, true, max_payload));
          },
          py::arg("job"), py::arg("rank"), py::arg("core"), py::arg("socket"), py::arg("memory"),
          py::arg("peer_bell"), py::arg("max_payload"), Unlocked())
      .def(
          "fail_job",
          [](Server& server, uint32_t job, int code, int rank, const std::string& text) {
            server.fail_job(job, Error(static_cast<ErrorCode>(code), text, rank));
          },
          py::arg("job"), py::arg("code"), py::arg("rank"), py::arg("text"), Unlocked())
      .def(
          "stalled",
          [](Server& server, uint32_t job) {
            std::vector<std::pair<uint32_t, std::vector<int>>> result;
            for (auto& entry : server.stalled(job)) result.emplace_back(entry.key, entry.missing);
            return result;
          },
          py::arg("job"), Unlocked())
      .def(
          "next_event",
          [](Server& server, double timeout_s) -> std::optional<JobEvent> {
            JobEvent event;
            if (!server.next_event(event, timeout_s)) return std::nullopt;
            return event;
          },
          py::arg("timeout_s"), Unlocked());
}

void bind_client(py::module_& m) {
  m.attr("ALL_KEYS") = PboxClient::kAllKeys;
  m.attr("NO_GRAD") = flag::no_grad;
  m.attr("INIT") = flag::init;
  m.attr("MAX_PAYLOAD") = kMaxPayload;
  m.attr("MAX_WORKERS") = kMaxWorkers;
  m.attr("NO_CORE") = kNoCore;
  py::class_<PboxClient>(m, "PboxClient")
      .def(py::init<Engine&, int, int>(), py::arg("engine"), py::arg("rank"), py::arg("cores") = 0,
           py::keep_alive<1, 2>())
      .def(
          "attach_tcp",
          [](PboxClient& client, int core, int fd, const TcpOptions& options, size_t max_payload) {
            client.attach(core, make_tcp_lane(fd, options, max_payload));
          },
          py::arg("core"), py::arg("fd"), py::arg("options"), py::arg("max_payload"), Unlocked())
      .def(
          "attach_shm",
          [](PboxClient& client, int core, int socket, int memory, int peer_bell,
             size_t max_payload) {
            client.attach(core, make_shm_lane(socket, memory, peer_bell, false, max_payload));
          },
          py::arg("core"), py::arg("socket"), py::arg("memory"), py::arg("peer_bell"),
          py::arg("max_payload"), Unlocked())
      .def(
          "add",
          [](PboxClient& client, const TableInfo& info,
             std::vector<std::shared_ptr<Memory>> answers,
             const std::vector<std::array<uint32_t, 3>>& servers) {
            std::vector<WireIds> ids;
            for (const auto& [key, chunk, group] : servers) ids.push_back({key, chunk, group});
            client.add(info, std::move(answers), std::move(ids));
          },
          py::arg("info"), py::arg("answers"), py::arg("servers"), Unlocked())
      .def("drop", &PboxClient::drop, py::arg("table"), Unlocked())
      .def(
          "push",
          [](PboxClient& client, uint32_t table, uint32_t key, int flags,
             const Array<uint8_t>& memory) {
            std::byte* data = bytes_of(memory);
            const py::gil_scoped_release release;
            client.push(table, key, static_cast<uint8_t>(flags), data);
          },
          py::arg("table"), py::arg("key"), py::arg("flags"), py::arg("memory").noconvert())
      .def(
          "pull",
          [](PboxClient& client, uint32_t table, uint32_t key, const Array<uint8_t>& memory) {
            std::byte* data = bytes_of(memory);
            const py::gil_scoped_release release;
            client.pull(table, key, data);
          },
          py::arg("table"), py::arg("key"), py::arg("memory").noconvert())
      .def(
          "read_state",
          [](PboxClient& client, uint32_t table, uint32_t key, uint8_t array,
             const Array<uint8_t>& memory) {
            std::byte* at = bytes_of(memory);
            const py::gil_scoped_release release;
            client.read_state(table, key, array, at);
          },
          py::arg("table"), py::arg("key"), py::arg("array"), py::arg("memory").noconvert())
      .def("taken", &PboxClient::taken, py::arg("table"), py::arg("key"), Unlocked())
      .def(
          "write_state",
          [](PboxClient& client, uint32_t table, uint32_t key, uint8_t array, uint32_t taken,
             const Array<uint8_t>& memory) {
            std::byte* at = bytes_of(memory);
            const py::gil_scoped_release release;
            client.write_state(table, key, array, taken, at);
          },
          py::arg("table"), py::arg("key"), py::arg("array"), py::arg("taken"),
          py::arg("memory").noconvert())
      .def("set_hyper", &PboxClient::set_hyper, py::arg("table"), py::arg("group"),
           py::arg("hyper"), Unlocked())
      .def("done", &PboxClient::done, py::arg("table"), py::arg("key"), Unlocked())
      .def("wait", &PboxClient::wait, py::arg("table"), py::arg("key"), py::arg("timeout_s"),
           Unlocked())
      .def(
          "fail",
          [](PboxClient& client, int code, int rank, const std::string& text) {
            client.fail(Error(static_cast<ErrorCode>(code), text, rank));
          },
          py::arg("code"), py::arg("rank"), py::arg("text"), Unlocked())
      .def("close", &PboxClient::close, Unlocked())
      .def("failed", &PboxClient::failed, Unlocked())
      .def("counters", &PboxClient::counters, Unlocked());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Native core of phub_collective: lanes, PBox cores, the worker's engine, kernels.";
  py::register_exception_translator(&translate);
  bind_memory(m);
  bind_lanes(m);
  bind_server(m);
  bind_client(m);
  bind_kernels(m);
  bind_mesh(m);
}

"""Build of the native core and the mapping of folders to packages; the rest is in pyproject.toml.

Environment:
    PHUB_NATIVE=0         install without the native core (the pure Python parts still work)
    PHUB_SANITIZE=LIST    build with -fsanitize=LIST ("address,undefined" or "thread")
    PHUB_BUILD_JOBS=N     compiler processes at once (default: 2)
    CXX                   the C++20 compiler
"""

import os
import shutil
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

NATIVE = "backends/native"
SANITIZE = os.environ.get("PHUB_SANITIZE", "")


def headers() -> list[str]:
    """What every object depends on."""
    found = glob(f"{NATIVE}/*.h") + glob("kernels/**/*.h", recursive=True)
    return ["setup.py", *sorted(found)]


def require_compiler() -> None:
    """Stop with the fix in the message, instead of with the traceback of a failed subprocess."""
    candidates = (
        [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    )
    if not any(map(shutil.which, candidates)):
        raise SystemExit(
            f"[setup] expected a C++20 compiler, found none of {', '.join(candidates)}: "
            "apt-get install g++, or set CXX, or set PHUB_NATIVE=0 to do without the native core"
        )


def is_stale(obj: str, source: str) -> bool:
    """True when `source`, a header or this file is newer than the object made from it."""
    if not os.path.exists(obj):
        return True
    return max(map(os.path.getmtime, [source, *headers()])) > os.path.getmtime(obj)


class BuildNative(build_ext):
    """build_ext that looks for the compiler before it starts, recompiles only stale objects, and
    keeps the objects of each sanitizer apart."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if SANITIZE:
            self.build_temp += "-" + SANITIZE.replace(",", "-")
        self.force = True  # link always: is_stale decides what is compiled

    def build_extensions(self) -> None:
        require_compiler()
        super().build_extensions()


def extensions() -> list[Pybind11Extension]:
    if os.environ.get("PHUB_NATIVE", "1") == "0":
        return []
    sanitizer = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g"] if SANITIZE else []
    # No contraction into fused multiply-add: results must equal those of NumPy and torch.
    flags = ["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden", *sanitizer]
    return [
        Pybind11Extension(
            "phub_collective.backends.native._core",
            sources=sorted(glob(f"{NATIVE}/*.cpp") + glob("kernels/*.cpp")),
            depends=headers(),
            include_dirs=[".", NATIVE],
            extra_compile_args=flags,
            extra_link_args=sanitizer,
            cxx_std=20,
        )
    ]


def packages() -> list[str]:
    """phub_collective's own packages, and the mapped top-level folders under their names (those
    are also reachable through links inside phub_collective, which must not count twice)."""
    links = ["phub_collective.backends*", "phub_collective.kernels*"]
    mapped = find_packages(include=["backends", "backends.*", "kernels", "kernels.*"])
    own = find_packages(include=["phub_collective", "phub_collective.*"], exclude=links)
    return [*own, *(f"phub_collective.{name}" for name in mapped)]


ParallelCompile("PHUB_BUILD_JOBS", default=2, needs_recompile=is_stale).install()
setup(
    packages=packages(),
    package_dir={
        "phub_collective": "phub_collective",
        "phub_collective.backends": "backends",
        "phub_collective.kernels": "kernels",
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildNative},
)

// The loops for what every machine of this architecture has (SSE2 on x86-64).
#define PHUB_ISA baseline
#define PHUB_VECTOR_BYTES 16
#include "kernels/loops_impl.h"

namespace phub {

const Loops* loops_baseline() { return &baseline::kLoops; }

}  // namespace phub

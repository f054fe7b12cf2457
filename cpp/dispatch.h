#pragma once

namespace gnnaccel {

// Name of the instruction set the CPU kernels use on this machine.
const char* isa();

}  // namespace gnnaccel

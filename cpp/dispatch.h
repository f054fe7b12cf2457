#pragma once

namespace gnnaccel {

// Name of the instruction set the CPU kernels use on this machine.
const char* isa();

// Whether the CPU is AMD's: MKL takes half of its vectors there.
bool is_amd();

}  // namespace gnnaccel

// What of the binary looks at Python's own objects. The callers hold the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace gnnaccel {

// True if each container of `held` holds the very objects that it did. held: tuples (dict or list, tuple of its values,
// tuple of its keys, in their order, or None); false for anything else.
bool same_objects(const pybind11::list& held);

}  // namespace gnnaccel

// Whether AMX may be used.
#pragma once

namespace rudnn::cpu {

// Whether the chosen instruction set has the tiles of AMX and the system lets this process use them.
bool has_tiles();

}  // namespace rudnn::cpu

#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline __nv_bfloat16 __float2bfloat16(float x) {  // to the nearest, ties to even
  if (x != x) return {0x7fc0};
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
}

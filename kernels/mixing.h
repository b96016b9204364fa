/* `mix` of kvguard/kernels/mixing.py for the C extensions: the digest term of a page, in [0, 2**64). */

#ifndef KVGUARD_MIXING_H
#define KVGUARD_MIXING_H

#include <stdint.h>

static inline uint64_t mix(uint64_t key, uint64_t column, uint64_t tag)
{
    uint64_t x = (tag * 0x9E3779B97F4A7C15u) ^ (column * 0xD1342543DE82EF95u + key);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

#endif

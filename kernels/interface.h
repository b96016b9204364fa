/* What the C extensions say of themselves; see kvguard/kernels/native.py. */

#ifndef KVGUARD_INTERFACE_H
#define KVGUARD_INTERFACE_H

/* Raised, here and in native.py, with every change of what the functions are given or of what they do. */
#define KVGUARD_INTERFACE 1

#endif

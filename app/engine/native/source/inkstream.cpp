// The native kernels' one translation unit. Knows no torch and no Python: plain C types cross its border.
extern "C" int ink_abi(void) { return 1; }

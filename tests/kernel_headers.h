// Headers that torch's flex_attention kernels for the CPU include, which conftest.py has precompiled once for all.
#include <torch/csrc/inductor/cpp_prefix.h>
#if __has_include(<c10/util/Unroll.h>)
#include <c10/util/Unroll.h>
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <ATen/native/cpu/utils.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/Context.h>
#include <Python.h>
#include <sstream>
#include <cstdlib>
#include <cerrno>

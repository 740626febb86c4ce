"""Builds the native kernels, caches them, and selects a backend; most of it needs the standard library alone.

Main names: select_backend(), build() and the cache of built libraries.
Invariants: A library is used only with the sources, compiler and CPU that its cache key names. A crash of the compiler
never ends the service.
"""

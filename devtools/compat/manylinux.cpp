// Definitions that keep a local build within manylinux_2_28, the floor of the Hub.
//
// Newer C++ libraries export functions that older ones have inline or not at all; a compiler of this machine's age
// refers to them, and the kernel would then not load where glibc 2.28 is. Defined here, under their linker names and
// hidden, they never leave the kernel. Releases are built against the old libraries and do not contain this file.

#include <new>
#include <sstream>

#define HIDDEN_AS(NAME) __asm__(NAME) __attribute__((visibility("hidden"), used))

// GLIBC 2.32. Zero says that there may be threads, so that reference counts stay atomic.
extern char libc_single_threaded __asm__("__libc_single_threaded") __attribute__((visibility("hidden")));
char libc_single_threaded = 0;

// GLIBCXX 3.4.29.
[[noreturn]] void throw_bad_array_new_length() HIDDEN_AS("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// GLIBCXX 3.4.26: the default constructors, by way of the ones that take an open mode.
void make_stringstream(void* self) HIDDEN_AS("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stringstream(void* self) { ::new (self) std::stringstream(std::ios_base::in | std::ios_base::out); }

void make_ostringstream(void* self) HIDDEN_AS("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_ostringstream(void* self) { ::new (self) std::ostringstream(std::ios_base::out); }

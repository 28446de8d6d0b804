# Cross-compiles with Debian's g++-s390x-linux-gnu: _PYTHON_HOST_PLATFORM=linux-s390x CMAKE_ARGS=-DCMAKE_TOOLCHAIN_FILE=...
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR s390x)
set(CMAKE_C_COMPILER s390x-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER s390x-linux-gnu-g++)

// Lets tensors be on an imaginary "cuda:0" in a build of torch without CUDA: the guard that switches devices does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }

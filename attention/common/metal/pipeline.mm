// common/metal/pipeline.h on PyTorch's MPS stream: the project's only Objective-C++. Compiled without ARC, as
// kernel-builder does, so that what is created here is released here.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "common/metal/pipeline.h"

// kernel-builder's: the compiled shaders of the family.
#include EMBEDDED_METALLIB_HEADER

namespace rudnn::metal {

namespace {

constexpr size_t kMostBytes = 4096;      // of a copied argument
constexpr size_t kThreadgroupUnit = 16;  // threadgroup memory comes in multiples of so many bytes

[[noreturn]] void refuse(const std::string& kernel, const std::string& reason) {
  throw std::runtime_error("Metal kernel " + kernel + ": " + reason);
}

std::string reason_of(NSError* error) { return error != nil ? error.localizedDescription.UTF8String : "unknown error"; }

id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }

// Loaded once and kept for the life of the process.
id<MTLLibrary> library() {
  static const id<MTLLibrary> loaded = [] {
    NSError* error = nil;
    const id<MTLLibrary> library = EMBEDDED_METALLIB_NAMESPACE::createLibrary(device(), &error);
    if (library == nil) throw std::runtime_error("the Metal library could not be loaded: " + reason_of(error));
    return library;
  }();
  return loaded;
}

size_t in_units(size_t bytes) { return (bytes + kThreadgroupUnit - 1) / kThreadgroupUnit * kThreadgroupUnit; }

uint64_t volume(Size size) { return uint64_t{size.x} * size.y * size.z; }

MTLSize native(Size size) { return MTLSizeMake(size.x, size.y, size.z); }

}  // namespace

// Compiled pipelines by kernel and function constants, kept for the life of the process.
class Launch::Pipelines {
 public:
  static id<MTLComputePipelineState> of(const Launch& launch) {
    static Pipelines pipelines;
    const std::lock_guard<std::mutex> lock(pipelines.mutex_);
    id<MTLComputePipelineState>& pipeline = pipelines.compiled_[key_of(launch)];
    if (pipeline == nil) pipeline = compile(launch);
    return pipeline;
  }

 private:
  static std::string key_of(const Launch& launch) {
    std::string key = launch.kernel_;
    for (const Copy& constant : launch.constants_) {
      key += '\0' + std::to_string(constant.index) + '=';
      key.append(constant.data.begin(), constant.data.end());
    }
    return key;
  }

  static id<MTLComputePipelineState> compile(const Launch& launch) {
    MTLFunctionConstantValues* constants = [[MTLFunctionConstantValues new] autorelease];
    for (size_t i = 0; i < launch.constants_.size(); ++i) {
      const Copy& constant = launch.constants_[i];
      [constants setConstantValue:constant.data.data()
                             type:native(launch.constant_types_[i])
                          atIndex:static_cast<NSUInteger>(constant.index)];
    }
    NSError* error = nil;
    NSString* name = [NSString stringWithUTF8String:launch.kernel_.c_str()];
    const id<MTLFunction> function = [[library() newFunctionWithName:name constantValues:constants
                                                               error:&error] autorelease];
    if (function == nil) refuse(launch.kernel_, "not found in the library: " + reason_of(error));
    const id<MTLComputePipelineState> pipeline = [device() newComputePipelineStateWithFunction:function error:&error];
    if (pipeline == nil) refuse(launch.kernel_, "no pipeline: " + reason_of(error));
    return pipeline;
  }

  static MTLDataType native(ConstantType type) {
    switch (type) {
      case ConstantType::kBool:
        return MTLDataTypeBool;
      case ConstantType::kInt:
        return MTLDataTypeInt;
      case ConstantType::kUInt:
        return MTLDataTypeUInt;
      case ConstantType::kFloat:
        return MTLDataTypeFloat;
    }
  }

  std::mutex mutex_;
  std::map<std::string, id<MTLComputePipelineState>> compiled_;
};

void Launch::run(Size threadgroups, Size threads) const {
  @autoreleasepool {
    const id<MTLComputePipelineState> pipeline = Pipelines::of(*this);
    if (volume(threadgroups) == 0 || volume(threads) == 0) refuse(kernel_, "an empty launch");
    if (volume(threads) > pipeline.maxTotalThreadsPerThreadgroup) {
      refuse(kernel_, std::to_string(volume(threads)) + " threads in a threadgroup, where the pipeline allows " +
                          std::to_string(pipeline.maxTotalThreadsPerThreadgroup));
    }
    size_t memory = pipeline.staticThreadgroupMemoryLength;
    for (const Binding& binding : threadgroup_) memory += in_units(binding.offset);
    if (memory > device().maxThreadgroupMemoryLength) {
      refuse(kernel_, std::to_string(memory) + " bytes of threadgroup memory, where the device has " +
                          std::to_string(device().maxThreadgroupMemoryLength));
    }
    for (const Copy& copy : bytes_)
      if (copy.data.size() > kMostBytes) refuse(kernel_, "an argument of more than 4096 bytes that is no buffer");

    // PyTorch's encoder belongs to the stream's queue, and PyTorch ends and commits it when it sees fit.
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    __block std::exception_ptr failure;
    dispatch_sync(stream->queue(), ^{
      try {
        const id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
        [encoder setComputePipelineState:pipeline];
        for (const Binding& binding : buffers_) {
          [encoder setBuffer:(__bridge id<MTLBuffer>)binding.storage
                      offset:binding.offset
                     atIndex:static_cast<NSUInteger>(binding.index)];
        }
        for (const Copy& copy : bytes_) {
          [encoder setBytes:copy.data.data() length:copy.data.size() atIndex:static_cast<NSUInteger>(copy.index)];
        }
        for (const Binding& binding : threadgroup_) {
          [encoder setThreadgroupMemoryLength:in_units(binding.offset) atIndex:static_cast<NSUInteger>(binding.index)];
        }
        [encoder dispatchThreadgroups:native(threadgroups) threadsPerThreadgroup:native(threads)];
      } catch (...) {
        failure = std::current_exception();
      }
    });
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace rudnn::metal

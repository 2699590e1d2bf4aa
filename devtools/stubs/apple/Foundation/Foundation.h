// What Objective-C++ sources and PyTorch's MPS headers use of Foundation, for a syntax check.
#pragma once

#include <dispatch/dispatch.h>

typedef unsigned long NSUInteger;
typedef long NSInteger;
typedef signed char BOOL;

#define nil nullptr

@protocol NSObject
- (instancetype)retain;
- (oneway void)release;
- (instancetype)autorelease;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject>
+ (instancetype)new;
@end

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)text;
@property(readonly) const char* UTF8String;
@end

@interface NSError : NSObject
@property(readonly, copy) NSString* localizedDescription;
@end

@interface NSDictionary : NSObject
@end

// The update rules that have kernels: each is made from its scalars, and called with the scaled gradient, the master and the
// states of one element; it returns the new master. loops.cpp includes this.
#include "moments.hpp"
//
#include "adagrad.hpp"
#include "adam.hpp"
#include "adamw.hpp"
#include "lion.hpp"
#include "sgd.hpp"

constexpr RuleKernels kRules[] = {
    kernels_of<AdamW>("AdamW"),
    kernels_of<Adam>("Adam"),
    kernels_of<Lion>("Lion"),
    kernels_of<Adagrad>("Adagrad"),
    kernels_of<SGD>("SGD"),
    kernels_of<SGDMomentum>("SGD with momentum"),
    kernels_of<AdamW, Bf16States>("AdamW with bf16 states"),
    kernels_of<Adam, Bf16States>("Adam with bf16 states"),
    kernels_of<AdamW, CodedStates>("AdamW with int8 states"),
    kernels_of<Adam, CodedStates>("Adam with int8 states"),
    kernels_of<Lion, CodedStates>("Lion with int8 states"),
    kernels_of<SGDMomentum, CodedStates>("SGD with momentum with int8 states"),
};

// The update rules that have kernels: each is made from its scalars, and called with the scaled gradient, the master and the
// states of one element; it returns the new master. loops.cpp includes this.
#include "moments.hpp"
//
#include "adagrad.hpp"
#include "adam.hpp"
#include "adamw.hpp"
#include "lion.hpp"
#include "sgd.hpp"

using AllRules = RuleList<AdamW, Adam, Lion, Adagrad, SGD, SGDMomentum>;

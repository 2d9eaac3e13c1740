// The mean and the variance of values.
#pragma once

struct Moments {
    Real mean, variance;
};

__device__ __forceinline__ Real sum_of(Real value) { return value; }
template <class... Values>
__device__ __forceinline__ Real sum_of(Real value, Values... others) { return value + sum_of(others...); }

// The moments of the values of a hidden unit.
__device__ __forceinline__ Moments moments_of(Real value) { return {value, Real(0)}; }
template <class... Values>
__device__ __forceinline__ Moments moments_of(Values... values) {
    constexpr Real SHARE = Real(1) / sizeof...(values);
    const Real mean = SHARE * sum_of(values...);
    return {mean, SHARE * sum_of((values - mean) * (values - mean)...)};
}

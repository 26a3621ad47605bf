// Part of scaled_one_shot.cu and scaled_tiles.cu, which define INT8: the kinds of scales, SCALES, and what sums are.
#define TENSOR 0
#define ROW 1
#define BLOCK 2
#define W_ROW 3
typedef unsigned int u32;
typedef unsigned long long u64;
#if INT8  // what a sum is, and what four are together and in PTX
typedef int Sum;
typedef int4 FourSums;
#define OF_SUM "r"
#define FOUR_SUMS "v4.b32"
#else
typedef float Sum;
typedef float4 FourSums;
#define OF_SUM "f"
#define FOUR_SUMS "v4.f32"
#endif

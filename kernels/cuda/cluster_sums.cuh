// Part of scaled_fragments.cu, weight_only.cu and moe_decode.cu, whose constants PARTS and THREADS it uses: the PARTS thread blocks
// of a cluster send each sum to the one that owns it. `received` and `all_sums` are addresses in shared memory, where sums of
// one's own arrive and of the barrier that counts them; they are the same in every thread block of the cluster.

// One thread, before the cluster meets. bytes: that the others will send here.
__device__ __forceinline__ void expect_sums(u32 all_sums, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(all_sums), "r"(1 + THREADS) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(all_sums), "r"(bytes) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;");
}
// After it has met: 32 bits to place `place` of `received` in thread block `owner`.
__device__ __forceinline__ void send_sum(u32 received, u32 all_sums, int owner, int place, u32 bits) {
  u32 there;  // the same address in another thread block of the cluster
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(received), "r"(owner));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(there + place * 4), "r"(bits), "r"(there + (all_sums - received)) : "memory");
}
// All threads: own sums are stored and those of the others have arrived when it is done.
__device__ __forceinline__ void wait_for_sums(u32 all_sums) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(all_sums) : "memory");
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; "
               "@!done bra again;}" ::"r"(all_sums) : "memory");
}

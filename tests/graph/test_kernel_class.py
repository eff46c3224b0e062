"""What kernels compute, from names that libraries give them (all from published profiles)."""

from dpro_search.graph.event_names import KERNEL_CLASSES, kernel_class
from tests.every_case import every_case


@every_case(
    ("name", "found"),
    [
        ("volta_sgemm_64x64_nt", "gemm"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>(cutlass_80_tensorop::Params)", "gemm"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x16_MI32x32x8x1_SN_1LDSB0_WS64_WG64_4_1_WGM1.kd", "gemm"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4", "convolution"),
        ("void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1, false, true, true>(int, int)", "convolution"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct)", "normalization"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)", "normalization"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(Flash_fwd_params)", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >(R)", "reduction"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float>(int)", "optimizer"),
        ("void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 2ul>(int)", "embedding"),
        ("void fbgemm_gpu::permute_indices_weights_kernel<false, int, decltype(nullptr)>(int)", "embedding"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*)", "softmax"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(int)", "layout"),
        ("my_own_kernel", "other"),
    ],
)
def test_a_kernel_is_classed_by_its_name(name, found):
    assert kernel_class(name) == found
    assert found in KERNEL_CLASSES

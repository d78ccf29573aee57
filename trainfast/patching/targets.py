"""What each name that `patch` takes stands for."""

from trainfast.patching.registry import register

_ATTENTION = "trainfast.torch.attention.replacements"

register(
    "adamw",
    [
        ("torch.optim.AdamW", "trainfast.torch.AdamW"),
        ("torch.optim.Adam", "trainfast.torch.Adam"),
    ],
)
register(
    "amp",
    [
        ("torch.amp.GradScaler", "trainfast.torch.GradScaler"),
        ("torch.cuda.amp.GradScaler", "trainfast.torch.amp.CudaGradScaler"),
    ],
)
register(
    "clip",
    [
        (f"torch.nn.utils.{name}", f"trainfast.torch.{name}")
        for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm")
    ],
)
register(
    "attention",
    [
        *(
            (
                f"torch.nn.functional.{name}",
                f"{_ATTENTION}.{name}",
            )
            for name in ("scaled_dot_product_attention", "multi_head_attention_forward")
        ),
        (
            "torch.backends.mha.get_fastpath_enabled",
            f"{_ATTENTION}.get_fastpath_enabled",
        ),
    ],
    settings=[
        # Outside training, torch's transformer modules would compute all by themselves.
        (
            f"{_ATTENTION}.are_modules_patched",
            f"{_ATTENTION}.set_modules_patched",
            True,
        ),
    ],
    by_name=[
        # Also where torch has flash attention.
        (
            "trainfast.torch.attention.dispatch.is_named",
            "trainfast.torch.attention.dispatch.set_named",
            True,
        ),
    ],
)
register(
    "pyg",
    [
        ("torch_geometric.data.batch.collate", "trainfast.torch.pyg.collate.collate"),
        (
            "torch_geometric.data.in_memory_dataset.collate",
            "trainfast.torch.pyg.collate.collate_dataset",
        ),
        # Functions that PyG's models have imported by name.
        *(
            (
                f"torch_geometric.nn.pool.{name}",
                f"trainfast.torch.pyg.neighbours.{name}",
                True,
            )
            for name in ("radius_graph", "knn_graph", "radius", "knn")
        ),
    ],
    opt_in=True,
)

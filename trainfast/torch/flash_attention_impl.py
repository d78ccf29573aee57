"""The kernels as an implementation that torch.nn.attention can activate."""

from trainfast.torch.attention_overrides import Chosen


def register_flash_attention_impl() -> bool:
    """Tells torch of these kernels as the implementation "trainfast".

    torch.nn.attention.activate_flash_attention_impl("trainfast") then puts them under
    torch's own operators, on the CPU and on CUDA, which also reaches code that calls
    these directly, and restore_flash_attention_impl() takes them away. Calls with
    dropout run torch's own. Returns whether this torch has the registration.
    """
    try:
        from torch.library import get_kernel  # noqa: F401
        from torch.nn.attention import register_flash_attention_impl as register
    except ImportError:
        return False
    register("trainfast", register_fn=Chosen)
    return True

"""The search runs on the CPU only, so the SIMT runner has none."""


def pytest_collection_modifyitems(config, items):
    left_out = {item for item in items if _is_neighbours_on_simt(item)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _is_neighbours_on_simt(item):
    values = item.callspec.params if hasattr(item, "callspec") else {}
    on_simt = values.get("usable_backend") == "simt"
    return on_simt and "neighbours" in item.path.parts

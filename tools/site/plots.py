"""stub"""

DEVICES = ("h200", "cpu")


def page(name):
    return f"# {name}\n"

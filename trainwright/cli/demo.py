"""stub"""


def demo(): ...

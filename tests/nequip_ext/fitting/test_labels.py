"""What `e2ip fit` takes for references of NequIP's models."""


def test_weights_and_predictions(unpack, check_labels_of_fits):
    check_labels_of_fits(unpack("nequip", "best.ckpt"))

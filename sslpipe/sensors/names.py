"""What of this folder is `sslpipe.NAME`, too."""

NAMES = {"build_sensor_dataset": "sslpipe.sensors.dataset"}

"""What of this folder is `sslpipe.NAME`, too."""

NAMES = {"SensorFiles": "sslpipe.sensors.sensor_files"}
